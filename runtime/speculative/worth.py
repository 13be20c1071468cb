"""Which guesses are worth the time of their rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmq.runtime.scheduler_output import DraftPrices, DraftTerms
from llmq.runtime.speculative.pass_price import PassPrice

# By how much a guess is to repay its row: the best of many by their estimates are worse than those say, and what
# promises nothing in the mean only makes steps longer.
MARGIN = 0.07
# Of a step without guesses: what they have to promise, at best, to be tried.
TRIED_FOR = 0.05


def num_worth(chances: Sequence[Sequence[float]], terms: DraftTerms, spent_s: float = 0.0) -> list[int]:
    """How many guesses of each draft are verified, the first ones, where guessing has taken `spent_s`. chances: that a
    guess and all before it are right.

    The likeliest first over all drafts, as many as gain most: a row has no price of its own where it is free beside
    others, or is the first of a kernel's tile.
    """
    if terms.prices is None:
        return [len(draft) for draft in chances]
    ranked = sorted(
        (-chance, place, index) for index, draft in enumerate(chances) for place, chance in enumerate(draft)
    )
    counts = [0] * len(chances)
    for _, _, index in ranked[: most_worth([-chance for chance, _, _ in ranked], terms.prices, spent_s)]:
        counts[index] += 1
    return counts


def most_worth(ranked: Sequence[float], prices: DraftPrices, spent_s: float) -> int:
    """How many of guesses with these falling chances are to be verified."""
    rows_s = np.array(prices.rows_s[: len(ranked) + 1])
    rows_s = rows_s[: int(np.searchsorted(rows_s, prices.spare_s - spent_s, side="right"))]
    if len(rows_s) < 2:
        return 0
    worth_s = (1.0 - MARGIN) * prices.token_s * np.cumsum(ranked[: len(rows_s) - 1])
    gained_s = np.concatenate([[0.0], worth_s]) - rows_s
    return int(gained_s.argmax())


@dataclass(frozen=True)
class Gain:
    """Of guessing for some requests in a step, as deep as it gains most."""

    gained_s: float  # against not guessing
    given: float  # tokens a request and step


def gain_of(count: int, chance: float, price: PassPrice, terms: DraftTerms) -> Gain:
    """For `count` requests, a pass for each guess, each right with `chance` after those before it."""
    prices, rows = terms.prices, terms.prices.rows_s[count::count]
    best, right, given, pass_s = Gain(0.0, 1.0), 1.0, 0.0, price.seconds(count)
    unread_s = price.seconds(2 * count) - pass_s  # where all are right the last one is still to be read
    for depth, rows_s in enumerate(rows[: terms.num_tokens], 1):
        right *= chance
        given += right
        gained_s = prices.token_s * count * given - rows_s - depth * pass_s - right * unread_s
        if gained_s > best.gained_s:
            best = Gain(gained_s, 1.0 + given)
    return best
