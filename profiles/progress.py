"""How long work reports where it is, without knowing who shows it. `llmq.cli.console.progress()` is one that draws."""

from typing import Protocol


class Progress(Protocol):
    """Called as work proceeds: `done` of `total` `unit`s of `stage`. `total=None`: not known yet."""

    def __call__(self, stage: str, done: int, total: int | None, *, unit: str = "") -> None: ...


def silent(stage: str, done: int, total: int | None, *, unit: str = "") -> None:
    """The progress that nobody watches."""
