"""What an OpenAI-shaped server takes, found out by asking it: each way of asking is tried with a few tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmq.profiles.errors import FailedError, InputError
from llmq.profiles.load.arrivals import Arrival
from llmq.profiles.load.client import LoadClient
from llmq.profiles.load.metrics import RequestRecord
from llmq.profiles.load.prompts import Prompts, TokenIdPrompts, WordPrompts, words

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Where no vocabulary is known: every one of today's models has these, and special tokens are rarely among them.
COMMON_IDS = TokenIdPrompts(vocab_size=30_000, first_id=1_000)

_USAGE = {"include_usage": True}
_USAGE_OF_EACH_EVENT = _USAGE | {"continuous_usage_stats": True}  # vLLM's
_FEW_WORDS, _MORE_WORDS = 8, 72


@dataclass(frozen=True)
class Target:
    """How to ask one model of one server."""

    path: str  # COMPLETIONS or CHAT
    model: str
    prompts: Prompts
    ignores_eos: bool  # takes `ignore_eos`: answers are as long as asked
    counts_each_event: bool  # sends usage in every event: ITL is exact where an event brings several tokens
    extra_body: dict[str, Any]
    num_probes: int = 0

    def body(self, prompt: Any, num_output_tokens: int) -> dict[str, Any]:
        """`prompt`: of `prompts`."""
        return {
            "model": self.model,
            **_asked(self.path, prompt),
            "max_tokens": num_output_tokens,
            "ignore_eos": True if self.ignores_eos else None,
            "stream_options": _USAGE_OF_EACH_EVENT if self.counts_each_event else _USAGE,
            **self.extra_body,
        }

    def make_body(self, prompt_of: Any) -> Any:
        """(number, arrival) -> body, of a `prompt_maker`."""

        def make(number: int, arrival: Arrival) -> dict[str, Any]:
            return self.body(prompt_of(number, arrival), max(1, arrival.num_output_tokens))

        return make


async def probe(
    client: LoadClient,
    model: str,
    *,
    paths: Sequence[str] = (COMPLETIONS, CHAT),
    token_ids: TokenIdPrompts = COMMON_IDS,
    extra_body: dict[str, Any] | None = None,
) -> Target:
    """Ask for a token or two in each way. The first of `paths` that the server has is taken.

    Raises InputError for a server that cannot be measured (another key, no stream, no token counts), FailedError for
    one that does not answer.
    """
    prober = _Prober(client, model, extra_body or {})
    path = await prober.find_path(paths)
    ignores_eos = await prober.takes(path, ignore_eos=True)
    counts = await prober.takes(path, stream_options=_USAGE_OF_EACH_EVENT) and bool(prober.last.event_tokens)
    prompts: Prompts = token_ids
    if path == CHAT or not await prober.takes(path, prompt=token_ids.piece("probe", 16)):
        prompts = await prober.calibrate(path)
    return Target(path, model, prompts, ignores_eos, counts, extra_body or {}, prober.num_requests)


class _Prober:
    def __init__(self, client: LoadClient, model: str, extra_body: dict[str, Any]) -> None:
        self._client = client
        self._model = model
        self._extra_body = extra_body
        self.num_requests = 0
        self.last: RequestRecord | None = None

    async def ask(self, path: str, **fields: Any) -> RequestRecord:
        body = {"model": self._model, **_asked(path, _text("probe", _FEW_WORDS)), "max_tokens": 2, **self._extra_body}
        self.num_requests += 1
        self.last = await self._client.request(path, body | fields)
        return self.last

    async def takes(self, path: str, **fields: Any) -> bool:
        return (await self.ask(path, **fields)).error is None

    async def find_path(self, paths: Sequence[str]) -> str:
        for path in paths:
            record = await self.ask(path)
            if record.error is None:
                return path
            if record.error not in ("status 404", "status 405", "status 501"):
                break
        raise _explained(path, record)

    async def calibrate(self, path: str) -> WordPrompts:
        counts = []
        for count in (_FEW_WORDS, _MORE_WORDS):
            record = await self.ask(path, **_asked(path, _text("calibrate", count)))
            if record.error is not None:
                return WordPrompts()
            counts.append((count, record.num_prompt_tokens))
        return WordPrompts.calibrated(*counts)


def _text(key: str, count: int) -> str:
    return " ".join(words(key, count))


def _asked(path: str, prompt: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}


def _explained(path: str, record: RequestRecord) -> Exception:
    said = f": {record.error_detail}" if record.error_detail else ""
    reasons = {
        "status 401": f"{path} wants another key{said} (--api-key, or LLMQ_API_KEY)",
        "status 403": f"{path} wants another key{said} (--api-key, or LLMQ_API_KEY)",
        "not a stream": f"{path} does not stream: it answered at once, so that no first token can be timed",
        "no usage": f"{path} sends no token counts (usage) in its stream: give --tokenizer MODEL to count with",
    }
    if record.error in reasons:
        return InputError(reasons[record.error])
    return FailedError(f"{path} does not answer a small request: {record.error}{said}")
