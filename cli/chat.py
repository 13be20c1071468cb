"""`llmq chat`: talk to a model in the terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmq.cli import console
from llmq.cli.served_target import is_url, model_name, server_of
from llmq.profiles.errors import FailedError, InputError
from llmq.profiles.units import format_count

if TYPE_CHECKING:
    from llmq.cli.local_server import StreamedChat

app = typer.Typer(add_completion=False)

HELP = """\
/system TEXT  what the model is told about its role; without TEXT: nothing. Begins anew
/reset        forget the conversation, keep the role
/exit         leave, as Ctrl-D does. Ctrl-C stops an answer"""


@app.command()
def chat(
    target: Annotated[
        str, typer.Argument(help="A model to serve here (folder, .gguf file, hub id, alias), or the URL of a server.")
    ] = "smollm2-135m",
    model: Annotated[str | None, typer.Option(help="Which model of a URL. Default: its first.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told about its role.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of an answer. Default: what fits.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0: the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    seed: Annotated[int | None, typer.Option(help="The same answers for the same conversation.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="LLMQ_API_KEY", help="Of a URL.", show_default=False)] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Of a model served here, as for llmq serve.  [default: auto]", show_default=False)
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of a model served here.")] = None,
) -> None:
    """Chat with a model that is served for the time being, or with a server that is there already.

    Commands: /system TEXT, /reset, /exit. Ctrl-C stops an answer. Piped, each line of the input is a message and
    the answers are all that comes out.
    """
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    given = {"--kv-dtype": kv_dtype, "--threads": threads}
    options = [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
    if options and is_url(target):
        raise InputError(f"{options[0]} is of a model served here, and {target} is a server already: leave it away")
    if model is not None and not is_url(target):
        raise InputError(
            f"--model {model} is one of a server's models, and {target} is to be served here: "
            f"name the model alone, llmq chat {model}, or a server's URL"
        )
    with server_of(target, options, loading="llmq chat" if interactive else None) as url:
        name = model_name(url, model, api_key)
        if interactive:
            console.status(f"llmq chat: {name} at {url} · /help for commands")

        def ask(messages: list[dict[str, str]]) -> "StreamedChat":
            from llmq.cli.local_server import StreamedChat

            return StreamedChat(url, {"model": name, "messages": messages, **sampling}, api_key=api_key)

        conversation = Conversation(ask, system, interactive=interactive)
        for line in _typed_lines() if interactive else _piped_lines():
            if not conversation.take(line):
                break


class Conversation:
    """The turns so far. A piped one raises where an interactive one tells and goes on."""

    def __init__(
        self, ask: Callable[[list[dict[str, str]]], "StreamedChat"], system: str | None, *, interactive: bool
    ) -> None:
        self._ask = ask
        self._interactive = interactive
        self._system = system
        self.messages: list[dict[str, str]] = []
        self._reset()

    def take(self, line: str) -> bool:
        """A message or a command; False: it was the last."""
        text = line.strip()
        if not text:
            return True
        if not text.startswith("/"):
            self._answer(text)
            return True
        command, _, rest = text.partition(" ")
        if command == "/exit":
            return False
        if command == "/reset":
            self._reset()
        elif command == "/system":
            self._system = rest.strip() or None
            self._reset()
        elif command == "/help":
            console.status(HELP)
        else:
            self._complain(f"no command {command}; there are /system, /reset, /help and /exit")
        return True

    def _reset(self) -> None:
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def _answer(self, text: str) -> None:
        """Stream an answer and remember it, what came before Ctrl-C included. A failed one leaves no trace."""
        turn = {"role": "user", "content": text}
        answer = self._ask([*self.messages, turn])
        pieces: list[str] = []
        stopped = False
        try:
            with contextlib.closing(iter(answer)) as stream:
                for piece in stream:
                    pieces.append(piece)
                    console.write(_harmless(piece) if self._interactive else piece)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            stopped = True
        except FailedError as error:
            if pieces:
                console.print_text()
            self._complain(str(error))
            return
        console.print_text()
        self.messages += [turn, {"role": "assistant", "content": "".join(pieces)}]
        if self._interactive:
            console.status("(stopped)" if stopped else _timing_line(answer))

    def _complain(self, message: str) -> None:
        if not self._interactive:
            raise FailedError(message)
        console.warn(message)


def _timing_line(answer: "StreamedChat") -> str:
    timing = answer.timing
    parts = [format_count(timing.num_tokens, "token"), f"TTFT {console.format_duration(timing.ttft_s)}"]
    if timing.num_tokens > 1:
        parts.append(f"{timing.tokens_per_s:.1f} tokens/s")
    if answer.finish_reason == "length":
        parts.append("cut: no more tokens fit or were allowed")
    return f"({' · '.join(parts)})"


def _harmless(text: str) -> str:
    """Without the control characters by which a text could command the terminal."""
    return "".join(letter for letter in text if letter in "\n\t" or (letter >= " " and not "\x7f" <= letter <= "\x9f"))


def _typed_lines() -> Iterator[str]:
    """What is typed after a prompt, with editing and history, until Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() then edits lines)

    while True:
        try:
            yield _text(input("> "))
        except KeyboardInterrupt:
            console.status("\n(Ctrl-D or /exit to leave)")
        except EOFError:
            console.print_text()
            return


def _piped_lines() -> Iterator[str]:
    yield from map(_text, sys.stdin)


def _text(line: Any) -> str:
    """As Unicode can carry it: bytes that were none are shown as such."""
    return line.encode(errors="surrogateescape").decode(errors="replace")
