"""Prompts of a wanted length: token ids where a server takes them, else words whose cost in tokens was measured."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmq.profiles.load.arrivals import MOONCAKE_BLOCK_TOKENS, Arrival
from llmq.profiles.load.generator import random_prompt_ids

# Common English words: with the space before it each is one token of nearly every vocabulary that was trained on text.
_WORDS = (
    "the of and to in that it was for on are with they be at one have this from by hot word but what some is you had "
    "can out other were all there when up use your how said an each she which do their time if will way about many "
    "then them write would like so these her long make thing see him two has look more day could go come did number "
    "sound no most people my over know water than call first who may down side been now find any new work part take "
    "get place made live where after back little only round man year came show every good me give our under"
)
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True)
class TokenIdPrompts:
    """Prompts as token ids: the length is what was asked. Ids are drawn from `first_id` up to `vocab_size`."""

    vocab_size: int
    first_id: int = 0

    def __str__(self) -> str:
        return f"random token ids from {self.first_id:,} to {self.vocab_size - 1:,}"

    def piece(self, key: str, num_tokens: int) -> list[int]:
        return random_prompt_ids(key, num_tokens, self.vocab_size, first_id=self.first_id)

    def join(self, pieces: list[list[int]], num_tokens: int) -> list[int]:
        return [token_id for piece in pieces for token_id in piece][:num_tokens]


@dataclass(frozen=True)
class WordPrompts:
    """Prompts as random words. The server's own count of two prompts says what a word costs, and what it adds itself
    (a chat template, BOS); lengths are met on average, not each to the token."""

    tokens_per_word: float = 1.0
    added_tokens: float = 0.0

    @classmethod
    def calibrated(cls, small: tuple[int, int], large: tuple[int, int]) -> "WordPrompts":
        """From two prompts of (words, tokens by the server's count)."""
        per_word = (large[1] - small[1]) / (large[0] - small[0])
        return cls(per_word, max(0.0, small[1] - per_word * small[0])) if per_word > 0 else cls()

    def __str__(self) -> str:
        return f"random words, {self.tokens_per_word:.2f} tokens each and {self.added_tokens:.0f} that the server adds"

    def piece(self, key: str, num_tokens: int) -> list[str]:
        return words(key, max(1, round(num_tokens / self.tokens_per_word)))

    def join(self, pieces: list[list[str]], num_tokens: int) -> str:
        count = max(1, round((num_tokens - self.added_tokens) / self.tokens_per_word))
        return " ".join([word for piece in pieces for word in piece][:count])


Prompts = TokenIdPrompts | WordPrompts


def words(key: str, count: int) -> list[str]:
    """The same words for the same key."""
    return random.Random(key).choices(WORDS, k=count)


def prompt_maker(prompts: Prompts, salt: str, length_scale: float = 1.0) -> Callable[[int, Arrival], Any]:
    """(number, arrival) -> its prompt. Without `hash_ids` no two prompts begin alike; with them, equal ids are equal
    blocks of 512 tokens times `length_scale`.

    `salt` goes into all of them: a server's prefix cache then knows nothing of another run's.
    """
    block_tokens = max(1, round(MOONCAKE_BLOCK_TOKENS * length_scale))

    def make(number: int, arrival: Arrival) -> Any:
        wanted = arrival.num_prompt_tokens
        if arrival.hash_ids:
            pieces = [prompts.piece(f"{salt} block {hash_id}", block_tokens) for hash_id in arrival.hash_ids]
        else:
            pieces = []
        held = block_tokens * len(pieces)
        if held < wanted:
            pieces.append(prompts.piece(f"{salt} request {number}", wanted - held))
        return prompts.join(pieces, wanted)

    return make
