"""What every script here shares: `--json`, one table, and where the traces are."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmq.cli import console

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Report:
    """One measurement: a table for people, `figures` for programs."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    figures: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    return made


def run(arguments: argparse.Namespace, measure: Callable[[argparse.Namespace], Report]) -> dict[str, Any]:
    """Measure, print, and return the figures."""
    report = measure(arguments)
    if arguments.json:
        print(json.dumps(report.figures, indent=2), flush=True)
    else:
        console.print_table(report.title, report.columns, report.rows)
        console.print_notes(report.notes)
    return report.figures


def trace_path(name: str) -> Path:
    path = shared_path("traces", name)
    if not path.is_file():
        sys.exit(f"{path} is not there: set LLMQ_SHARED to the folder of shared data")
    return path


def shared_path(*names: str) -> Path:
    """Real data in $LLMQ_SHARED, else in the folder `shared` beside the repository."""
    return Path(os.environ.get("LLMQ_SHARED") or REPOSITORY.parent / "shared").joinpath("data", *names)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"


def whole_numbers(text: str) -> list[int]:
    """8,16,32 as an option's value."""
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """arc_easy,gsm8k as an option's value."""
    return text.split(",")


def limits(text: str) -> dict[str, int]:
    """arc_easy=200,gsm8k=50 as an option's value; 100 is of every task, under "" for its name."""
    pairs = [part.rpartition("=") for part in text.split(",")]
    return {task: int(number) for task, _, number in pairs}


Arguments = Sequence[str] | None
