"""Generation: the sequences of one HTTP call, from prompts to deltas."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec

from llmq.runtime.frontend.output_processor import SequenceDelta, SequenceOutput
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.server.engine_client import CutOffError, EngineClient, EngineDeadError
from llmq.runtime.server.errors import ApiError, unavailable
from llmq.runtime.server.metrics import ServerMetrics


@dataclass
class Prompt:
    """One prompt of a call and how it is to be continued; `n` sequences follow from it."""

    token_ids: list[int]
    params: SamplingParams


class Choice:
    """One sequence: `index` is its place in the answer."""

    def __init__(self, index: int, prompt: Prompt, request: EngineRequest, output: SequenceOutput) -> None:
        self.index = index
        self.prompt = prompt
        self.request = request
        self.output = output
        self.last_output_s: float | None = None


class Generation:
    """`async for choice, delta in generation`: deltas of all choices as they come, until all have finished.

    Of the `n` sequences of a prompt the first goes ahead; the others follow once it has brought something, for then
    the prompt is in the prefix cache and is not computed n times. Leaving early needs `close`, which aborts the rest.
    """

    def __init__(
        self, call_id: str, prompts: Sequence[Prompt], n: int, stop: Sequence[str], tokenizer: Tokenizer
    ) -> None:
        self.prompts = prompts
        self.arrival_s = time.monotonic()
        self.choices: list[Choice] = []
        for prompt in prompts:
            for i in range(n):
                index = len(self.choices)
                request = EngineRequest(
                    request_id=f"{call_id}-{index}",
                    prompt_token_ids=prompt.token_ids,
                    sampling_params=_nth_params(prompt.params, i),
                    arrival_time_s=self.arrival_s,
                )
                output = SequenceOutput(request.request_id, tokenizer, stop=stop, min_tokens=prompt.params.min_tokens)
                self.choices.append(Choice(index, prompt, request, output))
        self._n = n
        self._by_id = {choice.request.request_id: choice for choice in self.choices}

    async def run(self, client: EngineClient, metrics: ServerMetrics) -> AsyncIterator[tuple[Choice, SequenceDelta]]:
        """Raises ApiError: 503 where the engine is gone, 500 where it gave up on one of the sequences."""
        stream = client.open()
        try:
            stream.add([choice.request for choice in self.choices[:: self._n]])
            async for output in stream:
                choice = self._by_id[output.request_id]
                if choice.last_output_s is None and choice.index % self._n == 0 and output.finish_reason != "error":
                    followers = self.choices[choice.index + 1 : choice.index + self._n]
                    stream.add([follower.request for follower in followers])
                delta = choice.output.process(output)
                if delta.finish_reason is not None and output.finish_reason is None:
                    stream.abort([output.request_id])  # a stop string ended it: the engine does not know
                self._observe(choice, delta, metrics)
                if delta.finish_reason == "error":
                    raise ApiError(500, f"the engine gave this request up: {delta.error}", kind="server_error")
                yield choice, delta
        except CutOffError as error:
            raise unavailable("the server is shutting down", "shutting_down") from error
        except EngineDeadError as error:
            raise unavailable(f"the engine is dead: {error}", "engine_dead") from error
        finally:
            stream.close()
            for choice in self.choices:
                if choice.output.finish_reason is None:
                    metrics.observe_finish("abort", time.monotonic() - self.arrival_s)

    @property
    def num_unfinished(self) -> int:
        return sum(choice.output.finish_reason is None for choice in self.choices)

    def usage_counts(self) -> tuple[int, int, int]:
        """Prompt tokens (each prompt once), completion tokens of all choices, prompt tokens from the prefix cache."""
        leaders = self.choices[:: self._n]
        return (
            sum(len(prompt.token_ids) for prompt in self.prompts),
            sum(len(choice.output.token_ids) for choice in self.choices),
            sum(leader.output.num_cached_tokens for leader in leaders),
        )

    def _observe(self, choice: Choice, delta: SequenceDelta, metrics: ServerMetrics) -> None:
        now = time.monotonic()
        since_last_s = None if choice.last_output_s is None else now - choice.last_output_s
        metrics.observe_output(now - self.arrival_s, since_last_s)
        choice.last_output_s = now
        if delta.finish_reason is not None:
            metrics.observe_finish(delta.finish_reason, now - self.arrival_s)


def _nth_params(params: SamplingParams, i: int) -> SamplingParams:
    """Of a seeded prompt each sequence gets a seed of its own; what the prompt's score is, the first one brings."""
    if i == 0:
        return params
    seed = None if params.seed is None else (params.seed + i + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(params, seed=seed, prompt_logprobs=None)
