"""An engine without a model: every request gets the next tokens of one script. Run as a program it is a whole process.

A prompt that holds REFUSED is refused when it is added; one that holds SHED is shed by the first step; one that holds
FATAL makes the step raise.
"""

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from llmq.profiles.errors import InputError
from llmq.runtime.config import EngineConfig
from llmq.runtime.request import EngineInfo, EngineRequest, EngineStats, RequestOutput, TokenLogprobs

REFUSED, FATAL, SHED = 500, 501, 502
BLOCK_TOKENS, NUM_BLOCKS = 16, 64
DEFAULT_SCRIPT = tuple(range(100, 400))


@dataclass
class _Running:
    request: EngineRequest
    num_cached_tokens: int
    num_output_tokens: int = 0


class FakeEngine:
    def __init__(self, config: EngineConfig, script: Sequence[int] = DEFAULT_SCRIPT, vocab_size: int = 512) -> None:
        if config.max_num_seqs == 13:
            raise InputError("--max-num-seqs 13: unlucky")
        self.info = EngineInfo(
            model=config.model,
            vocab_size=vocab_size,
            max_model_len=config.max_model_len or 256,
            eos_token_ids=[2],
            num_blocks=NUM_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            kv_cache_bytes=2**20,
            weight_bytes=2**20,
            device="cpu",
            fingerprint={"dtype": "none"},
        )
        self.script = list(script)
        self.added: list[EngineRequest] = []
        self.aborted: list[str] = []
        self._running: dict[str, _Running] = {}
        self._seen: set[tuple[int, ...]] = set()
        self._num_steps = 0

    def add_request(self, request: EngineRequest) -> None:
        if REFUSED in request.prompt_token_ids:
            raise ValueError("refused on arrival")
        prompt = tuple(request.prompt_token_ids)
        num_cached = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS if prompt in self._seen else 0
        self.added.append(request)
        self._running[request.request_id] = _Running(request, num_cached)
        for name, seed in request.forks:
            params = msgspec.structs.replace(request.sampling_params, seed=seed, prompt_logprobs=None)
            fork = msgspec.structs.replace(request, request_id=name, sampling_params=params, forks=[])
            self._running[name] = _Running(fork, num_cached)

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        known = [request_id for request_id in request_ids if self._running.pop(request_id, None)]
        self.aborted += known
        return [RequestOutput(request_id=request_id, finish_reason="abort") for request_id in known]

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def step(self) -> list[RequestOutput]:
        self._num_steps += bool(self._running)
        outputs = [self._advance(state) for state in self._running.values()]
        for output in outputs:
            if output.finish_reason:
                del self._running[output.request_id]
        return outputs

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass

    def stats(self) -> EngineStats:
        used = sum(-(-len(state.request.prompt_token_ids) // BLOCK_TOKENS) for state in self._running.values())
        return EngineStats(
            num_running=len(self._running),
            num_waiting=0,
            num_blocks=NUM_BLOCKS,
            num_free_blocks=NUM_BLOCKS - used,
            num_steps=self._num_steps,
            prompt_tokens=0,
            generation_tokens=0,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            num_preemptions=0,
        )

    def _advance(self, state: _Running) -> RequestOutput:
        request, params = state.request, state.request.sampling_params
        if FATAL in request.prompt_token_ids:
            raise RuntimeError("the forward failed")
        if SHED in request.prompt_token_ids:
            return RequestOutput(
                request_id=request.request_id, finish_reason="shed", error="too many before it", retry_after_s=2.2
            )
        self._seen.add(tuple(request.prompt_token_ids))
        first = state.num_output_tokens == 0
        new = [] if params.max_tokens == 0 else [self.script[state.num_output_tokens % len(self.script)]]
        state.num_output_tokens += len(new)
        ended = bool(new) and (new[0] in params.stop_token_ids or (new[0] == 2 and not params.ignore_eos))
        finish = "stop" if ended else "length" if state.num_output_tokens >= params.max_tokens else None
        scores_prompt = first and params.prompt_logprobs is not None
        return RequestOutput(
            request_id=request.request_id,
            new_token_ids=new,
            logprobs=None if params.logprobs is None else [_score(token, params.logprobs) for token in new],
            prompt_logprobs=[
                _score(token, params.prompt_logprobs)
                for token in request.prompt_token_ids[params.prompt_logprobs_start :]
            ]
            if scores_prompt
            else None,
            num_cached_tokens=state.num_cached_tokens,
            queue_s=0.0 if first else None,
            finish_reason=finish,
            stop_token_id=new[0] if finish == "stop" else None,
        )


def _score(token_id: int, num_top: int) -> TokenLogprobs:
    """The chosen token comes second, after 65 ("A" or near it): so it is among two alternatives and not among one."""
    return TokenLogprobs(token_id, -0.5, 2, [(65, -0.25), (token_id, -0.5)][:num_top])


class PacedFakeEngine(FakeEngine):
    """A millisecond a step, so that half a million tokens are minutes."""

    def step(self) -> list[RequestOutput]:
        time.sleep(0.001)
        return super().step()


if __name__ == "__main__":
    from llmq.runtime import engine_process

    sys.exit(engine_process.main(PacedFakeEngine))
