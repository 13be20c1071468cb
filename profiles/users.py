"""How many users a budget serves at once, by the lengths of a trace."""

from dataclasses import dataclass
from pathlib import Path

from llmq.profiles.budget import Budget
from llmq.profiles.held_blocks import ENOUGH, HeldBlocks, held_blocks
from llmq.profiles.load.arrivals import read_trace


@dataclass(frozen=True)
class Users:
    """How many users with the lengths of a trace are served at once, and the blocks that they hold."""

    trace: str
    held: HeldBlocks  # by one of them
    chance: float  # that blocks suffice at a random moment,
    at_once: int  # with so many users
    median_blocks: int  # in use by all of them
    p99_blocks: int
    num_blocks: int  # that there are beside their states


def users_of(budget: Budget, trace: Path) -> Users:
    """Users whose requests are as long as those of `trace`, up to `budget.num_tokens`. Raises InputError."""
    held = held_blocks(read_trace(trace), budget.layout, step_tokens=budget.step_tokens, longest=budget.num_tokens)
    users = held.most_users(budget.blocks_beside)
    return Users(
        trace.name, held, ENOUGH, users, held.in_use(users, 0.5), held.in_use(users, 0.99), budget.blocks_beside(users)
    )
