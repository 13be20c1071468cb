"""What other numbers in some linears would cost a model: KL divergence from itself, on text, through the runtime."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmq.evals.divergence import measure_positions
from llmq.evals.perplexity import check_window_fits, scoring_requests
from llmq.evals.stepping import RequestStream
from llmq.evals.windows import plan_windows
from llmq.profiles.errors import InputError
from llmq.runtime.engine import Engine
from llmq.runtime.request import EngineRequest

# The original's logits are kept, for they are compared with once for each linear: float32, [tokens, vocab_size].
MAX_LOGITS_BYTES = 1 << 30


@dataclass(frozen=True)
class _Logits:
    positions: Tensor  # [n, vocab_size] float32
    next_token_ids: Tensor  # [n]


class WeightDamage:
    """Mean KL(original ‖ changed) in nats a token, over the scored tokens of a few windows of a text.

    Called with {linear: its weight [out, in]} it computes as if the model had these, and leaves it as it was. The
    engine must be one that `Engine.replaced_weights` takes. Raises InputError for a text that is too short.
    """

    def __init__(self, engine: Engine, token_ids: list[int], *, window: int, num_windows: int) -> None:
        self._engine = engine
        if len(token_ids) < window:
            raise InputError(f"{len(token_ids)} tokens of text, {window} are needed to measure on")
        fits = max(1, MAX_LOGITS_BYTES // (4 * engine.info.vocab_size * window))
        plan = plan_windows(len(token_ids), window, max_windows=min(num_windows, fits))
        check_window_fits(plan, engine)
        self._token_ids, self._plan = token_ids, plan
        self._original = self._logits()

    @property
    def num_tokens(self) -> int:
        """Positions that are compared."""
        return self._plan.num_scored

    def __call__(self, weights: Mapping[str, Tensor]) -> float:
        with self._engine.replaced_weights(weights):
            changed = self._logits()
        measured = [
            measure_positions(before.positions, after.positions, before.next_token_ids).kl
            for before, after in zip(self._original, changed, strict=True)
        ]
        return float(torch.cat(measured).double().mean())

    def _logits(self) -> list[_Logits]:
        return [self._of_window(request) for request in scoring_requests(self._token_ids, self._plan)]

    def _of_window(self, request: EngineRequest) -> _Logits:
        pieces: list[Tensor] = []
        self._engine.observe_logits(lambda _, __, logits: pieces.append(logits.cpu()))
        try:
            for _ in RequestStream(self._engine, [request]):
                pass
        finally:
            self._engine.observe_logits(None)
        first_scored = request.sampling_params.prompt_logprobs_start
        return _Logits(torch.cat(pieces), torch.tensor(request.prompt_token_ids[first_scored:]))
