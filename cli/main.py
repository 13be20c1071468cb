"""The `llmq` command: a verb is one module of this folder, imported when it is named."""

import contextlib
import difflib
import errno
import importlib
import os
import signal
import sys

import typer
from typer.core import TyperCommand, TyperGroup

VERBS = {
    "quickstart": "The whole loop on a small real model, explained: budget, quantize, prove, serve.",
    "kv-budget": "How many tokens and users fit on a card, from config.json alone.",
    "quantize": "Make a 4-bit, INT8 or FP8 checkpoint, and report what was done to each layer.",
    "eval": "Perplexity, divergence from a baseline, and tasks, on the runtime that serves.",
    "serve": "An OpenAI-compatible server on the paged runtime.",
    "chat": "Talk to a model in the terminal: one served for the time being, or a server's.",
    "batch": "A file of OpenAI batch requests through the engine at full batch, durable and resumable.",
    "profile": "How fast a model can at most be on a machine, and how fast it is on this one.",
    "bench": "Load on any OpenAI-shaped server: latencies, goodput under an SLO, $ a million tokens.",
    "inspect": "What is in a checkpoint: architecture, format of each layer, bytes.",
    "doctor": "What this machine has and lacks, and what each lack means.",
}


# What no program can help, wherever it meets it: a full disk, a closed pipe.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE, errno.EIO)


class VerbGroup(TyperGroup):
    """Imports `llmq.cli.<verb>` when that verb is named; `llmq --help` lists them from the table above, unimported."""

    def list_commands(self, ctx):
        return list(VERBS)

    def get_command(self, ctx, cmd_name):
        return TyperCommand(cmd_name, help=VERBS[cmd_name]) if cmd_name in VERBS else None

    def resolve_command(self, ctx, args):
        name = args[0]
        if name not in VERBS:
            near = difflib.get_close_matches(name, VERBS, n=1) or [verb for verb in VERBS if verb.startswith(name)]
            hint = f"did you mean '{near[0]}'?" if near else f"the verbs are: {', '.join(VERBS)}"
            ctx.fail(f"no verb '{name}' ({hint})")
        command = typer.main.get_command(importlib.import_module("llmq.cli." + name.replace("-", "_")).app)
        command.name = name
        return name, command, args[1:]


app = typer.Typer(
    cls=VerbGroup,
    name="llmq",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="One loop over one checkpoint: budget → quantize → prove → serve → measure, on one paged-attention runtime.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"llmq {version('llmq-toolkit')}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", is_eager=True, callback=_print_version, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Entry point. An exception with an `exit_code` is an answer: its message goes to stderr, without a traceback."""
    # OpenMP's threads spin while they wait for each other: on a machine with anything else to do that costs five times
    # the work itself. Read when torch loads, so it is set before.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Unwinds what is under way, so that no partial folder and no server is left; serve drains instead.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        exit_code, said = getattr(error, "exit_code", None), str(error)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            from llmq.cli.console import forget_stdout

            forget_stdout()
            exit_code, said = 1, error.strerror + (f": {error.filename}" if error.filename else "")
        if not isinstance(exit_code, int):
            raise
        with contextlib.suppress(OSError):
            print(f"llmq: {said}", file=sys.stderr)
        sys.exit(exit_code)
