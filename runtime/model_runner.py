"""ModelRunner: owns weights, KVStore and device buffers, executes plans, and decides nothing."""

import itertools
from collections.abc import Callable, Sequence

import msgspec
import torch

from llmq.runtime.attention.base import AttentionBackend
from llmq.runtime.batch import BatchInputs, RunnerRequest
from llmq.runtime.kv_store import KVStore
from llmq.runtime.models.loader import Model
from llmq.runtime.sampling.logprobs import token_logprobs
from llmq.runtime.sampling.sampler import Sampler
from llmq.runtime.scheduler_output import RequestResult, ScheduledRequest, SchedulerOutput, StepResult

# Rows of logits computed at once where every position of a prompt is scored: 256 × 49,152 words × 4 B = 48 MiB.
LOGITS_TILE = 256

# (request_id, position of the first row, logits [num_rows, vocab_size] float32)
LogitsObserver = Callable[[str, int, torch.Tensor], None]


class ModelRunner:
    def __init__(
        self,
        model: Model,
        store: KVStore,
        attention: AttentionBackend,
        sampler: Sampler,
        device: torch.device,
    ) -> None:
        self.model = model
        self.attention = attention
        self.sampler = sampler
        self.device = device
        self.store = store
        self.logits_observer: LogitsObserver | None = None
        self._requests: dict[str, RunnerRequest] = {}

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> StepResult:
        """Compute the planned tokens, and sample where a request has caught up with itself."""
        for request_id in plan.forgotten_request_ids:
            self._requests.pop(request_id, None)
        for new in plan.new_requests:
            self._requests[new.request_id] = RunnerRequest(new, len(self.store.layout.groups))
        requests = [self._requests[item.request_id] for item in plan.scheduled]
        for item, request in zip(plan.scheduled, requests, strict=True):
            request.extend_blocks(item)
        self.store.copy_blocks(plan.block_copies)
        inputs = BatchInputs.build(plan.scheduled, requests, self.store.layout, self.device)
        hidden = self.model.forward(inputs, self.store, self.attention)
        prompt_logprobs = {
            request.request_id: self._score_prompt(item, request, hidden[start : start + item.num_scheduled_tokens])
            for item, request, start in zip(plan.scheduled, requests, inputs.query_start_loc, strict=False)
            if request.score_prompt
        }
        sampled = self._sample(plan.scheduled, requests, hidden, inputs.query_start_loc)
        return StepResult(
            results={
                request.request_id: RequestResult(
                    token_ids=made.token_ids if made else [],
                    logprobs=made.logprobs if made else [],
                    prompt_logprobs=prompt_logprobs.get(request.request_id, []),
                    forks=made.forks if made else [],
                )
                for request, made in zip(requests, sampled, strict=True)
            }
        )

    def _sample(
        self,
        items: Sequence[ScheduledRequest],
        requests: Sequence[RunnerRequest],
        hidden: torch.Tensor,
        query_start_loc: list[int],
    ) -> list[RequestResult | None]:
        rows = [index for index, item in enumerate(items) if item.samples]
        results: list[RequestResult | None] = [None] * len(items)
        if not rows:
            return results
        last = torch.tensor([query_start_loc[index + 1] - 1 for index in rows], device=self.device)
        logits = self.model.logits(hidden[last])
        samples = [requests[index].sampled_as() for index in rows]
        counts = torch.tensor([len(group) for group in samples], device=self.device)
        made = iter(
            self.sampler(logits.repeat_interleave(counts, dim=0), [request for group in samples for request in group])
        )
        for index, group in zip(rows, samples, strict=True):
            own, *forks = itertools.islice(made, len(group))
            requests[index].token_ids.extend(own.token_ids)
            requests[index].forks = []
            results[index] = msgspec.structs.replace(own, forks=forks)
        return results

    def _score_prompt(self, item: ScheduledRequest, request: RunnerRequest, hidden: torch.Tensor):
        """Log probabilities of the prompt tokens that this chunk predicts: position p is predicted at p - 1."""
        params, start = request.params, item.num_computed_tokens
        first = max(params.prompt_logprobs_start - 1, start)
        end = min(start + item.num_scheduled_tokens, request.num_prompt_tokens - 1)
        entries = []
        for tile in range(first, end, LOGITS_TILE):
            tile_end = min(tile + LOGITS_TILE, end)
            logits = self.model.logits(hidden[tile - start : tile_end - start])
            if self.logits_observer is not None:
                self.logits_observer(request.request_id, tile, logits)
            entries += token_logprobs(
                torch.log_softmax(logits, dim=-1), request.token_ids[tile + 1 : tile_end + 1], params.prompt_logprobs
            )
        return entries
