"""DraftPasses: what a drafter with layers of its own computes at once, on every rank."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmq.runtime.batch import BatchInputs, RunnerRequest
from llmq.runtime.kv_store import KVStore
from llmq.runtime.programs.base import Program
from llmq.runtime.scheduler_output import DraftPass


@dataclass(frozen=True)
class Span:
    """Tokens of a request from a position on."""

    request: RunnerRequest  # whose blocks K and V go to
    start: int
    token_ids: Sequence[int]
    is_named: bool  # the word after its last token is asked for


class DraftPasses:
    """Computes passes on a rank. The first one decides on them, and tells the others before it begins one."""

    def __init__(
        self,
        body: Program,
        head: Program,
        store: KVStore,
        *,
        reads_hidden: bool = False,
        tell: Callable[[DraftPass], None] | None = None,
    ) -> None:
        """`body` runs the drafter's layers over `store`, `head` names words. reads_hidden: by the model's hidden states
        (EAGLE). tell: to all other ranks, where there are some."""
        self.name, self.reads_hidden = body.name, reads_hidden
        self._body, self._head, self._store, self._tell = body, head, store, tell

    def run(self, spans: Sequence[Span], features: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(hidden states [num_tokens, hidden_size], whole where spans are named or `features` are given; float32 logits
        [number of named spans, words], or None). features: [num_tokens, hidden_size] beside the tokens, for EAGLE."""
        if self._tell is not None:
            self._tell(
                DraftPass(
                    request_ids=[span.request.request_id for span in spans],
                    starts=[span.start for span in spans],
                    token_ids=[list(span.token_ids) for span in spans],
                    are_named=[span.is_named for span in spans],
                    features=b"" if features is None else _as_bytes(features),
                )
            )
        return self._compute(spans, features)

    @torch.inference_mode()
    def follow(self, told: DraftPass, requests: Mapping[str, RunnerRequest]) -> None:
        """This rank's part of what the first one computes now."""
        parts = zip(told.request_ids, told.starts, told.token_ids, told.are_named, strict=True)
        spans = [Span(requests[name], start, token_ids, is_named) for name, start, token_ids, is_named in parts]
        features = None
        if told.features:
            dtype, num_tokens = self._head.model.embedding.dtype, sum(map(len, told.token_ids))
            features = torch.frombuffer(bytearray(told.features), dtype=dtype).view(num_tokens, -1)
            features = features.to(self._store.device)
        self._compute(spans, features)

    def _compute(self, spans: Sequence[Span], features: Tensor | None) -> tuple[Tensor, Tensor | None]:
        ends = list(itertools.accumulate(len(span.token_ids) for span in spans))
        rows = [end - 1 for end, span in zip(ends, spans, strict=True) if span.is_named]
        named = self._store.staging.send_integers(rows)
        inputs = BatchInputs.of_spans(
            [(span.start, span.token_ids) for span in spans],
            [span.request.block_ids for span in spans],
            self._store.layout,
            self._store.staging,
        )
        reads_all = features is not None or len(rows) == ends[-1]
        hidden = self._body.forward(replace(inputs, output_rows=None if reads_all else named, features=features))
        return hidden, self._head.logits(hidden[named]) if rows else None


def _as_bytes(features: Tensor) -> bytes:
    return features.cpu().contiguous().view(torch.uint8).numpy().tobytes()
