"""The seam between the loop over layers and a method: one decoder layer to quantize, and what became of it.

A method is a function LayerWork -> LayerOutcome. It decides what to measure and when (`LayerWork.measure` reads the
inputs that linears have with the weights as they are at that moment), and leaves the layer computing with what is
stored, so that the loop can run it once more for the inputs of the next.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from llmq.quantize.formats.quantized_weight import QuantizedWeight
from llmq.quantize.formats.scheme import WeightScheme
from llmq.quantize.mappings import ScaleMapping

# Channels that a product of x^T x takes at once. What is below the tiles on the diagonal is the mirror image of what is
# above them, and not computed: nearly half of the work for a wide linear.
_TILE = 256


# Of the weight of a sample's tokens in E[x x^T], that of the first one at least. It is what later ones attend to most,
# whatever it is (an attention sink: Xiao et al., arXiv 2309.17453; by activations a thousand times as large as others:
# Sun et al., arXiv 2402.17762), so its error is an error of all of them, and as one token of 2,048 it had next to no
# say. Tokens by their weight, the first ones' and others: RSQ, Sung et al., arXiv 2503.01820.
FIRST_TOKEN_SHARE = 1 / 32


def first_token_weight(length: int) -> float:
    """Of a sample's first token, where each of the others has 1: FIRST_TOKEN_SHARE of all, and no less than theirs."""
    return max(1.0, FIRST_TOKEN_SHARE / (1.0 - FIRST_TOKEN_SHARE) * (length - 1))


class InputStatistics:
    """Running statistics of a linear's input over tokens, in float32: E[x x^T], E|x| and max|x|."""

    weighs_first_tokens = True

    def __init__(self, in_features: int, device: torch.device | str = "cpu"):
        # The sum over tokens of x x^T on and above the diagonal's tiles; once `gram` was asked for, the whole mean.
        self._outer = torch.zeros(in_features, in_features, device=device)
        self._weight = 0.0  # of the tokens of `_outer`
        self._is_mean = False
        self._sum_abs = torch.zeros(in_features, device=device)
        self.max_abs = torch.zeros(in_features, device=device)
        self.num_tokens = 0

    def add(self, x: Tensor) -> None:
        """x: [batch, length, in_features], samples from their first tokens on; or [tokens, in_features] of any."""
        first_weight = first_token_weight(x.shape[1]) if self.weighs_first_tokens and x.dim() == 3 else 1.0
        first = x[:, 0].to(torch.float32) if first_weight > 1.0 else None
        x = x.reshape(-1, x.shape[-1]).to(torch.float32)
        if not len(x):
            return
        if self._is_mean:
            self._outer *= self._weight
            self._is_mean = False
        self._add_outer(x)
        self._weight += len(x)
        if first is not None:
            self._add_outer(first, first_weight - 1.0)
            self._weight += (first_weight - 1.0) * len(first)
        x = x.abs()
        self._sum_abs += x.sum(0)
        torch.maximum(self.max_abs, x.amax(0), out=self.max_abs)
        self.num_tokens += x.shape[0]

    def _add_outer(self, x: Tensor, weight: float = 1.0) -> None:
        for start in range(0, x.shape[1], _TILE):
            stop = start + _TILE
            self._outer[start:stop, start:].addmm_(x[:, start:stop].T, x[:, start:], alpha=weight)

    @property
    def gram(self) -> Tensor:
        """E[x x^T], [in, in]: GPTQ's Hessian of the squared output error, but for a factor of two. First tokens have
        the weight of several (`first_token_weight`).

        Not a copy, which of a wide linear would take hundreds of megabytes: not to be changed.
        """
        if not self._is_mean:
            self._outer /= max(self._weight, 1.0)
            for start in range(0, self._outer.shape[0], _TILE):
                stop = start + _TILE
                self._outer[stop:, start:stop] = self._outer[start:stop, stop:].T
            self._is_mean = True
        return self._outer

    @property
    def mean_abs(self) -> Tensor:
        """E|x|, [in]"""
        return self._sum_abs / max(self.num_tokens, 1)

    def divide(self, s: Tensor) -> None:
        """Make them those of x / s, s [in] positive: what the input becomes when its source takes the scales."""
        self._outer.div_(s).div_(s[:, None])
        self._sum_abs /= s
        self.max_abs = self.max_abs / s

    @property
    def num_dead(self) -> int:
        """Input channels that are zero for every token."""
        return int((self._sum_abs == 0).sum())


class InputSample:
    """Some of a linear's input tokens, evenly spread, and max|x| over all of them."""

    def __init__(self, in_features: int, device: torch.device | str = "cpu", tokens_per_call: int = 32):
        self.max_abs = torch.zeros(in_features, device=device)
        self.num_tokens = 0  # of all
        self._tokens_per_call, self._kept = tokens_per_call, [torch.zeros(0, in_features, device=device)]

    def add(self, x: Tensor) -> None:
        """x: [..., in_features], the tokens of one call"""
        x = x.reshape(-1, x.shape[-1]).to(torch.float32)
        if len(x):
            torch.maximum(self.max_abs, x.abs().amax(0), out=self.max_abs)
            self.num_tokens += len(x)
            self._kept.append(x[:: -(-len(x) // self._tokens_per_call)].clone())

    @property
    def tokens(self) -> Tensor:
        """[num_kept, in_features]"""
        return torch.cat(self._kept)


class SampledStatistics(InputStatistics):
    """Running statistics, and some of the tokens that they are of.

    First tokens weigh as others: at 8 bits, for which these are taken, each token's own rounding is most of the error
    (KL of SmolLM2-135M, as it is: 0.012, with the weight 0.013).
    """

    weighs_first_tokens = False

    def __init__(self, in_features: int, device: torch.device | str = "cpu", tokens_per_call: int = 32):
        super().__init__(in_features, device)
        self._sample = InputSample(in_features, device, tokens_per_call)

    def add(self, x: Tensor) -> None:
        super().add(x)
        self._sample.add(x)

    @property
    def tokens(self) -> Tensor:
        """[num_kept, in_features], as they were seen."""
        return self._sample.tokens


T = TypeVar("T", InputStatistics, InputSample, SampledStatistics)


@dataclass(frozen=True)
class LayerWork:
    """A decoder layer and all that a method may know of it. Names are relative to the layer.

    layer: float32, on the device. A method replaces weights in place; nothing else reads them before it is done.
    schemes: what each linear that is quantized becomes. Every name is an nn.Linear of `layer`; the rest stays.
    samples: the layer's inputs, float32 [1, length, hidden] each, on any device: what the layers before it, already
        quantized, put out.
    run: the layer's output for one sample, of the same shape, in float32: what candidates are compared by.
    run_as_served: the same with products in the 16 bit of the model where the device has them: what is measured.
    dtype: of scales, norms and biases as stored.
    """

    layer: nn.Module
    schemes: Mapping[str, WeightScheme]
    mappings: tuple[ScaleMapping, ...]
    samples: Sequence[Tensor]
    run: Callable[[Tensor], Tensor]
    run_as_served: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    head_dim: int

    def linear(self, name: str) -> nn.Linear:
        return self.layer.get_submodule(name)

    def measure(self, names: Iterable[str] | None = None) -> dict[str, InputStatistics]:
        """Run every sample and take the statistics of the inputs of `names` (default: all that is quantized).

        Linears called with the same tensor share one InputStatistics. A forward ends as soon as each of `names` has
        been called, so that measuring the first linears of a layer does not cost its last ones. A linear that no token
        reaches (an expert) has num_tokens 0.
        """
        return self._watch(self.schemes if names is None else names, InputStatistics)

    def sample_inputs(self, names: Iterable[str], num_tokens: int) -> dict[str, InputSample]:
        """About `num_tokens` tokens of the inputs of `names`, from all samples alike; linears share as in `measure`."""
        return self._watch(names, partial(InputSample, tokens_per_call=max(1, num_tokens // len(self.samples))))

    def measure_and_sample(self, num_tokens: int) -> dict[str, SampledStatistics]:
        """`measure` of all that is quantized, with about `num_tokens` of the tokens."""
        tokens_per_call = max(1, num_tokens // len(self.samples))
        return self._watch(self.schemes, partial(SampledStatistics, tokens_per_call=tokens_per_call))

    def _watch(self, names: Iterable[str], make: Callable[[int, torch.device], T]) -> dict[str, T]:
        recorder = _InputRecorder({name: self.linear(name) for name in names}, make)
        with recorder:
            for sample in self.samples:
                recorder.begin()
                with suppress(_AllSeen):
                    self.run_as_served(sample)
        return recorder.seen


class _AllSeen(Exception):  # noqa: N818 - no error: ends a forward of which nothing more is wanted
    pass


class _InputRecorder(Generic[T]):
    """Hooks on linears that add their inputs to what `make` makes (of in_features and device), while it is open."""

    def __init__(self, linears: dict[str, nn.Linear], make: Callable[[int, torch.device], T]):
        self._linears, self._make = linears, make
        self.owners: dict[str, str] = {}  # linear -> the one whose inputs it shares
        self.seen: dict[str, T] = {}

    def __enter__(self) -> "_InputRecorder":
        self._hooks = [
            linear.register_forward_pre_hook(lambda _, args, name=name: self._see(name, args[0]))
            for name, linear in self._linears.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for name, linear in self._linears.items():
            if name not in self.seen:  # an expert that no token reached
                self.seen[name] = self._make(linear.in_features, linear.weight.device)

    def begin(self) -> None:
        self._inputs: dict[str, Tensor] = {}

    def _see(self, name: str, x: Tensor) -> None:
        owner = next((other for other, seen in self._inputs.items() if seen is x), name)
        if self.owners.setdefault(name, owner) != owner:
            raise RuntimeError(f"{name} reads another input than in the sample before")
        if owner == name:
            if name not in self.seen:
                self.seen[name] = self._make(x.shape[-1], x.device)
            self.seen[name].add(x)
        else:
            self.seen[name] = self.seen[owner]
        self._inputs[name] = x
        if len(self._inputs) == len(self._linears):
            self._inputs = {}
            raise _AllSeen


@dataclass(frozen=True)
class LinearOutcome:
    """A linear as it is stored and what that cost. None: the method has no such number.

    Errors are over the calibration tokens: E|W'x - Wx|^2 / E|Wx|^2, where W is the weight before the method, and first
    tokens weigh as `first_token_weight` says.
    """

    weight: QuantizedWeight
    weight_error: float  # |W' - W|^2 / |W|^2, against the weight that was rounded: after scales moved into it
    output_error: float | None = None
    rtn_output_error: float | None = None  # what plain rounding to the same scheme would have cost
    saturated_share: float | None = None  # weights outside the range that was kept
    num_dead_inputs: int | None = None  # input channels that are zero for every token
    num_tokens: int | None = None
    damping: float | None = None  # as a share of the Hessian's mean diagonal
    method: str | None = None  # of several that were tried, the one it is of


@dataclass(frozen=True)
class ScalingOutcome:
    """What a scale mapping came to."""

    mapping: ScaleMapping
    skipped: str | None = None
    alpha: float | None = None  # None: nothing beat leaving the scales at 1
    error: float | None = None
    unscaled_error: float | None = None
    num_unusable: int = 0
    num_sharing: int = 1  # query heads that share the scales of the KV head they read


@dataclass
class LayerOutcome:
    """What became of a layer. Names are relative to it."""

    linears: dict[str, LinearOutcome] = field(default_factory=dict)
    changed: dict[str, Tensor] = field(default_factory=dict)  # norms and biases that took a scale, in the stored dtype
    scalings: list[ScalingOutcome] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


Method = Callable[[LayerWork], LayerOutcome]
