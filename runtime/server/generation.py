"""Generation: the sequences of one HTTP call, from prompts to deltas."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from llmq.runtime.frontend.output_processor import SequenceDelta, SequenceOutput
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.request import BeamParams, EngineRequest
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.server.callers import Caller
from llmq.runtime.server.engine_client import CutOffError, EngineClient, EngineDeadError, TimedOutError
from llmq.runtime.server.errors import ApiError, overloaded, unavailable
from llmq.runtime.server.metrics import ServerMetrics
from llmq.runtime.server.responses import Json
from llmq.runtime.server.timings import SequenceTimes, timings


@dataclass
class Prompt:
    """One prompt of a call and how it is to be continued; `n` sequences follow from it."""

    token_ids: list[int]
    params: SamplingParams


class Choice:
    """One sequence: `index` is its place in the answer."""

    def __init__(self, index: int, prompt: Prompt, output: SequenceOutput) -> None:
        self.index = index
        self.prompt = prompt
        self.output = output
        self.times = SequenceTimes()


class Generation:
    """`async for choice, delta in generation`: deltas of all choices as they come, until all have finished.

    A prompt is one request; its `n` sequences are that request and n - 1 forks of it, which share what the prompt
    computed. Leaving early needs `aclose`, which aborts the rest.
    """

    def __init__(
        self,
        call_id: str,
        prompts: Sequence[Prompt],
        n: int,
        stop: Sequence[str],
        tokenizer: Tokenizer,
        *,
        caller: Caller,
        priority: int = 0,
        timeout_s: float | None = None,
        shown: frozenset[int] = frozenset(),
        beams: BeamParams | None = None,
    ) -> None:
        self.call_id = call_id
        self.prompts = prompts
        self.arrival_s = time.monotonic()
        self.choices: list[Choice] = []
        self.requests: list[EngineRequest] = []
        for prompt in prompts:
            names = [f"{call_id}-{len(self.choices) + i}" for i in range(n)]
            self.requests.append(
                EngineRequest(
                    request_id=names[0],
                    prompt_token_ids=prompt.token_ids,
                    sampling_params=prompt.params,
                    arrival_time_s=self.arrival_s,
                    priority=priority,
                    cache_salt=caller.cache_salt,
                    tenant=caller.tenant,
                    beams=beams,
                    forks=[(name, _nth_seed(prompt.params.seed, i)) for i, name in enumerate(names) if i],
                )
            )
            for name in names:
                output = SequenceOutput(name, tokenizer, stop=stop, min_tokens=prompt.params.min_tokens, shown=shown)
                self.choices.append(Choice(len(self.choices), prompt, output))
        self._n, self._beams = n, beams
        self._timeout_s = timeout_s
        self._by_id = {choice.output.request_id: choice for choice in self.choices}

    async def run(self, client: EngineClient, metrics: ServerMetrics) -> AsyncIterator[tuple[Choice, SequenceDelta]]:
        """Raises ApiError: 503 where the engine is gone, 504 when the time is up, 500 where the engine gave one of the
        sequences up, 429 where it shed one."""
        stream = client.open(self._timeout_s)
        unfinished = "abort"
        try:
            stream.add(self.requests)
            async for output in stream:
                choice = self._by_id[output.request_id]
                delta = choice.output.process(output)
                if delta.finish_reason is not None and output.finish_reason is None:
                    stream.abort([output.request_id])  # a stop string ended it: the engine does not know
                self._observe(choice, delta, output.queue_s, metrics)
                if delta.finish_reason == "shed":
                    unfinished = "shed"
                    raise overloaded(delta.error, output.retry_after_s)
                if delta.finish_reason == "error":
                    raise ApiError(500, f"the engine gave this request up: {delta.error}", kind="server_error")
                yield choice, delta
        except TimedOutError as error:
            unfinished = "timeout"
            message = f"not finished within the {self._timeout_s:g} s that this server gives a request"
            raise ApiError(504, message, kind="server_error", code="request_timeout") from error
        except CutOffError as error:
            raise unavailable("the server is shutting down", "shutting_down") from error
        except EngineDeadError as error:
            raise unavailable(f"the engine is dead: {error}", "engine_dead") from error
        finally:
            stream.close()
            for choice in self.choices:
                if choice.output.finish_reason is None:
                    metrics.observe_finish(unfinished, time.monotonic() - self.arrival_s)

    @property
    def num_unfinished(self) -> int:
        return sum(choice.output.finish_reason is None for choice in self.choices)

    @property
    def num_sequences(self) -> int:
        """That the engine still computes for it: a search runs all of its beams until it has its hypotheses."""
        if self._beams is None:
            return self.num_unfinished
        return -(-self.num_unfinished // self._n) * self._beams.width

    def usage_counts(self) -> tuple[int, int, int]:
        """Prompt tokens (each prompt once), completion tokens of all choices, prompt tokens from the prefix cache."""
        leaders = self.choices[:: self._n]
        return (
            sum(len(prompt.token_ids) for prompt in self.prompts),
            sum(len(choice.output.token_ids) for choice in self.choices),
            sum(leader.output.num_cached_tokens for leader in leaders),
        )

    def timings(self) -> Json:
        return timings([choice.times for choice in self.choices])

    def _observe(self, choice: Choice, delta: SequenceDelta, queue_s: float | None, metrics: ServerMetrics) -> None:
        since_arrival_s, before_s = time.monotonic() - self.arrival_s, choice.times.last_output_s
        if delta.token_ids:
            metrics.observe_output(since_arrival_s, None if before_s is None else since_arrival_s - before_s)
        choice.times.note(since_arrival_s, len(delta.token_ids), queue_s)
        if delta.finish_reason is not None:
            metrics.observe_finish(delta.finish_reason, since_arrival_s)


def _nth_seed(seed: int | None, i: int) -> int | None:
    """Of a seeded prompt each sequence has a seed of its own, of 64 bits as all are."""
    return None if seed is None else (seed + i + 2**63) % 2**64 - 2**63
