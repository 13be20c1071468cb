"""What stands between two attentions: an MLP, or a mixture of them."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from llmq.runtime.layers.linear import Linear

Activation = Callable[[Tensor], Tensor]

# By transformers' names for them.
ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class MLP:
    """W_out f(W_in x), or with a gate (Shazeer 2020, arXiv 2002.05202) W_out (f(W_gate x) · W_up x), where the gate's
    and the other's rows lie one after the other in `wide`."""

    def __init__(self, wide: Linear, out: Linear, activation: Activation, gated: bool) -> None:
        self.wide, self.out, self.activation, self.gated = wide, out, activation, gated
        self.linears = [wide, out]

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] -> the same shape."""
        wide = self.wide(x)
        if not self.gated:
            return self.out(self.activation(wide))
        gate, up = wide.chunk(2, dim=-1)
        return self.out(self.activation(gate) * up)


class Experts:
    """A sparse mixture (Shazeer et al. 2017, arXiv 1701.06538; Mixtral, 2401.04088): each token goes through the
    `per_token` experts of highest probability, weighted by it.

    Tokens are sorted by expert, so that each expert that is asked runs once a step.
    """

    def __init__(self, router: Linear, experts: Sequence[MLP], per_token: int, renormalize: bool) -> None:
        self.router, self.experts = router, experts
        self.per_token, self.renormalize = per_token, renormalize
        self.linears = [router, *(linear for expert in experts for linear in expert.linears)]

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] -> the same shape."""
        weights, chosen = self.route(x)
        order = chosen.flatten().argsort(stable=True)  # of (token, choice) pairs
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        rows = x[order // self.per_token].split(counts)
        parts = [expert(part) for expert, part in zip(self.experts, rows, strict=True) if len(part)]
        outputs = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)
        outputs[order] = torch.cat(parts)
        # Summed over a token's own choices, never over what the batch brought: its neighbours cannot change the order.
        return (outputs.unflatten(0, chosen.shape) * weights[..., None]).sum(dim=1).to(x.dtype)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, float32, and numbers of the experts of each token, [num_tokens, per_token] both."""
        probabilities = torch.softmax(self.router(x).float(), dim=-1)
        weights, chosen = probabilities.topk(self.per_token, dim=-1)
        if self.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, chosen
