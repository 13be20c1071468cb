"""The `llmq` command: a verb is one module of this folder, imported when it is named."""

import difflib
import importlib
import sys

import typer
from typer.core import TyperGroup

VERBS = ("quickstart", "kv-budget", "quantize", "eval", "serve", "inspect", "doctor")


class VerbGroup(TyperGroup):
    """Resolves a verb to `llmq.cli.<verb>.app` on first use, so that `--help` of one verb imports that verb alone."""

    def list_commands(self, ctx):
        return list(VERBS)

    def get_command(self, ctx, cmd_name):
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module("llmq.cli." + cmd_name.replace("-", "_"))
        command = typer.main.get_command(module.app)
        command.name = cmd_name
        return command

    def resolve_command(self, ctx, args):
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"the verbs are: {', '.join(VERBS)}"
            ctx.fail(f"no verb '{args[0]}' ({hint})")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=VerbGroup,
    name="llmq",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Quantize, prove, serve and measure decoder LLMs: budget → quantize → prove → serve → measure, on one runtime.",
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
    """Entry point. An exception with an `exit_code` is an answer for the user: its message goes to stderr, no traceback."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        exit_code = getattr(error, "exit_code", None)
        if not isinstance(exit_code, int):
            raise
        print(f"llmq: {error}", file=sys.stderr)
        sys.exit(exit_code)
