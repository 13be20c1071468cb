"""TextPool: what finished requests said, for n-grams to be found in by others. Bounded, the least used goes first."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

# Places of a run that are kept and compared, the last ones.
_CANDIDATES = 8


@dataclass(eq=False)
class PooledText:
    salt: str
    token_ids: tuple[int, ...]
    runs: set[tuple[int, ...]] = field(default_factory=set)


@dataclass(frozen=True)
class PoolMatch:
    text: PooledText
    place: int  # where it goes on
    length: int  # tokens that agree before


class TextPool:
    """Texts are found by requests with the same salt only: as blocks of the prefix cache are, so that nobody can tell
    by the time that an answer takes what others, whose salt he does not know, were told."""

    def __init__(self, max_tokens: int, *, shortest: int, longest: int) -> None:
        """Holds `max_tokens` at most. A match is of `shortest` tokens or more, and not measured beyond `longest`."""
        self.max_tokens, self.num_tokens = max_tokens, 0
        self._shortest, self._longest = shortest, longest
        self._texts: OrderedDict[int, PooledText] = OrderedDict()  # by identity, the least used first
        self._places: dict[tuple[str, tuple[int, ...]], list[tuple[PooledText, int]]] = {}

    def add(self, salt: str, token_ids: Sequence[int]) -> None:
        """The last `max_tokens` of a text, in place of those that have not been used for longest."""
        text = PooledText(salt, tuple(token_ids[-self.max_tokens :]))
        if len(text.token_ids) <= self._shortest:
            return
        self._texts[id(text)] = text
        self.num_tokens += len(text.token_ids)
        for end in range(self._shortest, len(text.token_ids)):
            run = text.token_ids[end - self._shortest : end]
            text.runs.add(run)
            places = self._places.setdefault((salt, run), [])
            places.append((text, end))
            del places[:-_CANDIDATES]
        while self.num_tokens > self.max_tokens:
            _, oldest = self._texts.popitem(last=False)
            self._remove(oldest)

    def longest_match(self, salt: str, token_ids: Sequence[int]) -> PoolMatch | None:
        """Of the texts that say the last tokens too, the one that agrees with most of them; it counts as used."""
        best = None
        for text, place in reversed(self._places.get((salt, tuple(token_ids[-self._shortest :])), ())):
            length, most = self._shortest, min(self._longest, place, len(token_ids))
            while length < most and text.token_ids[place - length - 1] == token_ids[-length - 1]:
                length += 1
            if best is None or length > best.length:
                best = PoolMatch(text, place, length)
        if best is not None:
            self._texts.move_to_end(id(best.text))
        return best

    def _remove(self, text: PooledText) -> None:
        self.num_tokens -= len(text.token_ids)
        for run in text.runs:
            kept = [one for one in self._places[text.salt, run] if one[0] is not text]
            if kept:
                self._places[text.salt, run] = kept
            else:
                del self._places[text.salt, run]
