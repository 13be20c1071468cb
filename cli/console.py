"""The one place that prints. Results go to stdout; progress and remarks to stderr, bars only where somebody watches.

rich is imported when something is drawn: importing this module costs nothing, so that verbs may do it at the top.
"""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from llmq.profiles.errors import FailedError
from llmq.profiles.progress import Progress, silent
from llmq.profiles.units import format_bytes, format_bytes_exact

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "format_bytes",
    "format_bytes_exact",
    "format_duration",
    "heading",
    "print_json",
    "print_notes",
    "print_table",
    "print_text",
    "progress",
    "status",
    "warn",
    "write",
]

_UNLIMITED_WIDTH = 10_000  # of a pipe: a table is then as wide as its cells


def print_text(text: str = "") -> None:
    """A line of the result, as it is, to stdout."""
    write(text + "\n")


def write(text: str) -> None:
    """A piece of a line of the result, at once: text that is still being written."""
    with _results() as stdout:
        stdout.write(text)


def print_json(content: Any) -> None:
    """`content` as one JSON object on stdout: what `--json` prints, and all that it prints."""
    print_text(json.dumps(content, indent=2, ensure_ascii=False))


def print_table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on stdout. A column whose name begins with ">" is set flush right; cells are shown as they are.

    In a pipe the table is plain and never folded. A row without cells ([]) draws a rule.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if title:
        heading(title)  # not the table's own, which is folded at its width
    table = Table(
        box=box.SIMPLE_HEAD,
        show_header=any(name.strip(">") for name in columns),
        show_edge=False,
        header_style="bold",
        pad_edge=False,
    )
    for name in columns:
        right = name.startswith(">")
        table.add_column(Text(name.removeprefix(">")), justify="right" if right else "left", overflow="fold")
    for row in rows:
        if row:
            table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
        else:
            table.add_section()
    _print(table)


def print_notes(notes: Sequence[str]) -> None:
    """Remarks that belong to the result, one line each, to stdout."""
    from rich.text import Text

    for note in notes:
        _print(Text(f"- {note}"))


def heading(text: str) -> None:
    """A line of the result that names what follows."""
    from rich.text import Text

    _print(Text(text, style="bold"))


def status(message: str) -> None:
    """A remark on what is done or was decided, to stderr."""
    _stderr().print(message, markup=False, highlight=False, soft_wrap=True)


def warn(message: str) -> None:
    """A remark that the user should not miss, to stderr."""
    from rich.text import Text

    _stderr().print(Text.assemble(("warning: ", "bold yellow"), message), soft_wrap=True)


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """Give long work a `Progress` that draws one bar a stage, with the time left, on stderr; nothing when piped.

    with console.progress() as progress:
        find_model(name, progress=progress)
    """
    console = _stderr()
    if not console.is_terminal:
        yield silent
        return
    from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    class TimeLeft(ProgressColumn):
        def render(self, task: Task) -> Text:
            if task.finished_time is not None:
                return Text(f"in {format_duration(task.finished_time)}")
            left = task.time_remaining
            return Text("" if left is None else f"{format_duration(left)} left")

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[count]}", markup=False),
        TimeLeft(),
    )
    with Bars(*columns, console=console, refresh_per_second=4) as bars:
        stages: dict[str, TaskID] = {}

        def draw(stage: str, done: int, total: int | None, *, unit: str = "") -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total, count="")
            bars.update(stages[stage], completed=done, total=total, count=_count(done, total, unit))

        yield draw


def _count(done: int, total: int | None, unit: str) -> str:
    if unit == "B":
        return format_bytes(done) if total is None else f"{format_bytes(done)} of {format_bytes(total)}"
    amount = f"{done:,}" if total is None else f"{done:,} of {total:,}"
    return f"{amount} {unit}".rstrip()


def format_duration(seconds: float) -> str:
    """830 ms, 4.2 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


@contextlib.contextmanager
def _results() -> Iterator[TextIO]:
    """stdout, flushed afterwards. Raises FailedError where it takes no more: a result of which a part is missing is
    none."""
    if sys.stdout is None:
        raise FailedError("standard output is closed: there is nowhere to write the result")
    try:
        yield sys.stdout
        sys.stdout.flush()
    except OSError as error:
        forget_stdout()
        raise FailedError(f"standard output took only a part of the result: {error.strerror}") from None


def forget_stdout() -> None:
    """What is left in its buffer goes nowhere: Python would try again at the end, and complain again."""
    with contextlib.suppress(OSError, ValueError, AttributeError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _print(drawn: Any) -> None:
    from rich.console import Console

    with _results() as stdout:
        console = Console(width=None if stdout.isatty() else _UNLIMITED_WIDTH)
        with console.capture() as captured:
            console.print(drawn)
        stdout.write(captured.get())


@functools.cache
def _stderr() -> "Console":
    """One for the whole process: a remark made while bars are drawn is then put above them."""
    from rich.console import Console

    return Console(stderr=True)
