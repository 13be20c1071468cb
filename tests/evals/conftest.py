"""A toy Engine with a known distribution: the oracle of evals' unit tests."""

import pytest
import torch

from llmq.runtime.request import EngineInfo, EngineRequest, RequestOutput, TokenLogprobs


class ToyEngine:
    """A bigram model behind the interface of `runtime.engine.Engine`: the next token depends on the last one alone.

    Computes at most `chunk_tokens` tokens a step, over running requests first come first served, as the real one does.
    """

    def __init__(self, table: torch.Tensor, *, max_model_len: int = 256, chunk_tokens: int = 7, eos=()):
        self.table = table  # [vocab, vocab] float32: logits of what follows each token
        self.log_probs = table.log_softmax(-1)
        self.chunk_tokens = chunk_tokens
        self.requests: dict[str, dict] = {}
        self.seen: list[EngineRequest] = []
        self.max_seen_in_flight = 0
        self._callback = None
        self.info = EngineInfo(
            model="toy",
            vocab_size=len(table),
            max_model_len=max_model_len,
            eos_token_ids=list(eos),
            num_blocks=1,
            block_tokens=16,
            kv_cache_bytes=0,
            weight_bytes=table.numel() * 4,
            device="cpu",
            fingerprint={"kernels": "toy"},
        )

    def add_request(self, request: EngineRequest) -> None:
        assert request.request_id not in self.requests
        assert 0 < len(request.prompt_token_ids) <= self.info.max_model_len
        assert len(request.prompt_token_ids) + request.sampling_params.max_tokens <= self.info.max_model_len
        self.requests[request.request_id] = {"request": request, "computed": 0, "new": []}
        self.seen.append(request)
        self.max_seen_in_flight = max(self.max_seen_in_flight, len(self.requests))

    def abort(self, request_ids) -> None:
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def observe_logits(self, callback) -> None:
        self._callback = callback

    def step(self) -> list[RequestOutput]:
        budget, outputs = self.chunk_tokens, []
        for request_id, state in list(self.requests.items()):
            request = state["request"]
            tokens = request.prompt_token_ids + state["new"]
            n = min(budget, len(tokens) - state["computed"])
            if n == 0:
                break
            budget -= n
            start, state["computed"] = state["computed"], state["computed"] + n
            if self._callback and request.sampling_params.prompt_logprobs is not None:
                self._callback(request_id, start, self.table[tokens[start : start + n]])
            if state["computed"] == len(tokens):
                output = self._output(request, state, tokens)
                outputs.append(output)
                if output.finish_reason is not None:
                    del self.requests[request_id]
        return outputs

    def _output(self, request: EngineRequest, state: dict, tokens: list[int]) -> RequestOutput:
        params, prompt = request.sampling_params, request.prompt_token_ids
        prompt_logprobs = None
        if params.prompt_logprobs is not None and not state["new"]:
            positions = range(params.prompt_logprobs_start, len(prompt))
            prompt_logprobs = [self._entry(prompt[i - 1], prompt[i]) for i in positions]
        if params.max_tokens == 0:
            return RequestOutput(request_id=request.request_id, prompt_logprobs=prompt_logprobs, finish_reason="length")
        token = int(self.table[tokens[-1]].argmax())
        state["new"].append(token)
        stopped = token in params.stop_token_ids or (token in self.info.eos_token_ids and not params.ignore_eos)
        reason = "stop" if stopped else "length" if len(state["new"]) == params.max_tokens else None
        return RequestOutput(
            request_id=request.request_id,
            new_token_ids=[token],
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token_id=token if stopped else None,
        )

    def _entry(self, last: int, token: int) -> TokenLogprobs:
        row = self.log_probs[last]
        return TokenLogprobs(token, float(row[token]), int((row > row[token]).sum()) + 1, [])


@pytest.fixture
def toy_engine():
    """`toy_engine(vocab_size, seed=0, **options)` makes a ToyEngine with random bigram logits."""

    def make(vocab_size: int = 50, seed: int = 0, **options) -> ToyEngine:
        table = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
        return ToyEngine(table, **options)

    return make
