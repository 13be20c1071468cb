"""The text that is scored: read, encoded once, and its beginning-of-text policy."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from llmq.evals.perplexity import TextCounts
from llmq.profiles.errors import InputError
from llmq.runtime.frontend.tokenizer import Tokenizer


@dataclass(frozen=True)
class EncodedText:
    """A text and its token ids, encoded in one piece without special tokens."""

    source: str  # what the user called it
    text: str
    token_ids: list[int]
    prefix: tuple[int, ...]  # what stands before every window: the BOS that the tokenizer adds, or nothing
    _tokenizer: Tokenizer

    @classmethod
    def encode(cls, text: str, source: str, tokenizer: Tokenizer) -> "EncodedText":
        prefix = (tokenizer.bos_token_id,) if tokenizer.adds_bos and tokenizer.bos_token_id is not None else ()
        return cls(source, text, tokenizer.encode(text, add_special_tokens=False), prefix, tokenizer)

    @property
    def bos_policy(self) -> str:
        if self.prefix:
            return f"BOS (id {self.prefix[0]}) before every window, for the tokenizer adds one"
        return "no BOS, for the tokenizer adds none"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def counts(self, num_tokens: int) -> TextCounts:
        """Words and bytes of the first `num_tokens` tokens."""
        whole = num_tokens == len(self.token_ids)
        text = self.text if whole else self._tokenizer.decode(self.token_ids[:num_tokens], skip_special_tokens=False)
        return TextCounts.of(text, num_tokens)


def read_text(path: Path) -> str:
    """A UTF-8 file. Raises InputError with the place of the first byte that is not."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise InputError(f"the text {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: byte {error.start} cannot be decoded") from error


def check_same_tokenizer(baseline: Tokenizer, candidate: Tokenizer, text: EncodedText) -> None:
    """Distributions can be compared where every id means the same bytes to both models and the text the same ids.

    `text` was encoded by the candidate. Raises InputError naming the first difference. Compared by content: two
    tokenizer files that differ in layout are the same tokenizer.
    """
    if baseline.vocab_size != candidate.vocab_size:
        raise InputError(
            f"the baseline's tokenizer has {baseline.vocab_size} tokens and the candidate's {candidate.vocab_size}: "
            "KL divergence needs one vocabulary"
        )
    for token_id in range(candidate.vocab_size):
        ours, theirs = candidate.token_bytes(token_id), baseline.token_bytes(token_id)
        if ours != theirs:
            raise InputError(
                f"token {token_id} is {theirs!r} to the baseline and {ours!r} to the candidate: "
                "KL divergence needs one vocabulary"
            )
    of_baseline = EncodedText.encode(text.text, text.source, baseline)
    if (of_baseline.token_ids, of_baseline.prefix) != (text.token_ids, text.prefix):
        raise InputError(f"the two tokenizers encode {text.source} differently, though their vocabularies are equal")
