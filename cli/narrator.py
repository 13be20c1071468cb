"""The story that a verb tells while it works, step by step."""

from llmq.cli import console


class Narrator:
    """Prints titles, tables and explanations to stdout; nothing under --json, where the facts are all."""

    def __init__(self, num_steps: int, is_silent: bool) -> None:
        self._num_steps = num_steps
        self._is_silent = is_silent
        self._step = 0

    def step(self, title: str) -> None:
        self._step += 1
        if self._is_silent:
            console.status(f"{self._step}/{self._num_steps} {title}")
        else:
            console.heading(f"\n{self._step}/{self._num_steps} {title}")

    def text(self, text: str) -> None:
        if not self._is_silent:
            console.print_text(text)

    def table(self, columns: list[str], rows: list[list[str]]) -> None:
        if not self._is_silent:
            console.print_table(None, columns, rows)

    def piece(self, text: str) -> None:
        """A piece of a line that is still being written."""
        if not self._is_silent:
            console.write(text)
