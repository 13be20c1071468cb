"""The verbs of the `llmq` command: each is a module of this folder, imported when it is named."""

import difflib
import importlib

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
    "plan": "Which formats, GPUs and batches keep an SLO, and what their tokens cost.",
    "inspect": "What is in a checkpoint: architecture, format of each layer, bytes.",
    "doctor": "What this machine has and lacks, and what each lack means.",
}


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
