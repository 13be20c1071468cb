"""Text out of a stream of tokens: UTF-8 held back until whole, stop strings held back until decided."""

import codecs
from collections.abc import Sequence

from llmq.runtime.frontend.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Token ids in, the text that they complete out.

    A character is given out once all its bytes are there; bytes that can be no UTF-8 become U+FFFD as soon as that is
    certain. A character still unfinished at the end of a generation is dropped: it was cut, and half of it is no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> None:
        """`shown` are special tokens that are text all the same."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids - shown if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))


class StopStringMatcher:
    """Lets text through up to the first stop string that completes, reading character by character.

    So the result depends on the text alone, never on how it was cut into tokens: the stop string that ends first wins,
    and of several that end together the one that began first. What may yet become a stop string, the longest suffix
    that is a prefix of one, is held back.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is now certain to be output. After a match (`matched`) nothing more is."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        self._held += text
        ends = [(start + len(stop), start, stop) for stop in self._stop if (start := self._held.find(stop)) >= 0]
        if ends:
            _, start, self.matched = min(ends)
            certain, self._held = self._held[:start], ""
            return certain
        return self._release(self._num_held())

    def flush(self) -> str:
        """The end of the generation: what was held back is text."""
        return self._release(0)

    def _num_held(self) -> int:
        longest = max(map(len, self._stop)) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            suffix = self._held[-length:]
            if any(stop.startswith(suffix) for stop in self._stop):
                return length
        return 0

    def _release(self, num_held: int) -> str:
        cut = len(self._held) - num_held
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain
