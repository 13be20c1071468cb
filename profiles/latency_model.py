"""How long a step takes on a machine that is known by its datasheet: the roofline, with what is lost on the way.

    step = bytes / (bandwidth · b) + FLOPs / (peak · c) + step + layers · layer + tokens · token
         + 2 · layers · log2(ranks) · hop + what all-reduces move / link + expert passes · pass

Reading and computing are added and not overlapped: of the forms tried this one erred least on what was left out. The
coefficients are in latency_coefficients.toml, with where they are from.
"""

import functools
import math
import tomllib
from dataclasses import dataclass
from importlib.resources import files

from llmq.profiles.roofline import DecoderWork, Machine, StepWork

_LINK_SHARE = 0.5  # of a link's rate that an all-reduce reaches


@dataclass(frozen=True)
class Coefficients:
    """What is lost on the way from the datasheet; low, high: what a time is multiplied by for the interval that holds
    80 % of the points of models that were not fitted to."""

    bandwidth: float  # share of the datasheet's
    compute: float  # share of the dense peak in 8 and 16 bit
    compute_4_bits: float
    expert_compute: float  # of that share, in routed experts
    step_s: float
    layer_s: float
    token_s: float
    expert_pass_s: float  # one token through one expert of one layer
    hop_s: float  # of an all-reduce, for each doubling of the ranks
    low: float = 1.0
    high: float = 1.0


@functools.cache
def shipped_coefficients() -> Coefficients:
    text = files("llmq.profiles").joinpath("latency_coefficients.toml").read_text(encoding="utf-8")
    return Coefficients(**tomllib.loads(text)["coefficients"])


@dataclass(frozen=True)
class LatencyModel:
    work: DecoderWork
    machine: Machine
    coefficients: Coefficients

    def step_s(self, step: StepWork) -> float:
        """Seconds of a step that computes this, on all ranks at once."""
        lost, machine, arch = self.coefficients, self.machine, self.work.architecture
        peak = machine.flops_per_s * (lost.compute_4_bits if machine.computes_in_4_bits else lost.compute)
        dense_flops = step.flops - step.expert_flops
        return (
            step.num_bytes / (machine.bandwidth_bytes_per_s * lost.bandwidth)
            + (dense_flops + step.expert_flops / lost.expert_compute) / peak
            + lost.step_s
            + arch.num_layers * lost.layer_s
            + step.num_tokens * lost.token_s
            + step.expert_passes * lost.expert_pass_s
            + self._all_reduce_s(step.num_tokens)
        )

    def interval_s(self, step: StepWork) -> tuple[float, float, float]:
        """(least, expected, most)."""
        seconds = self.step_s(step)
        return seconds * self.coefficients.low, seconds, seconds * self.coefficients.high

    def decode_s(self, batch: int, context: int) -> float:
        """Of a step that brings one token to each of `batch` sequences."""
        return self.step_s(self.work.decode(batch, context))

    def prefill_s(self, num_tokens: int) -> float:
        """Of a prompt that is computed beside others."""
        return self.added_s(self.work.prefill(num_tokens))

    def added_s(self, step: StepWork) -> float:
        """What this adds to a step that is made anyway, and reads all weights anyway."""
        fixed = self.coefficients.step_s + self.work.architecture.num_layers * self.coefficients.layer_s
        read = step.num_bytes / (self.machine.bandwidth_bytes_per_s * self.coefficients.bandwidth)
        return self.step_s(step) - fixed - read

    def tpot_s(self, batch: int, num_prompt: int, num_output: int) -> float:
        """Time between two tokens of a request where `batch` requests of these lengths are always running: a decode
        step, and its share of the prompts that are computed meanwhile, one for every `num_output` tokens of each."""
        context = num_prompt + num_output // 2
        return self.decode_s(batch, context) + batch / max(1, num_output) * self.prefill_s(num_prompt)

    def tokens_per_s(self, batch: int, num_prompt: int, num_output: int) -> float:
        """Output tokens of all requests."""
        return batch / self.tpot_s(batch, num_prompt, num_output)

    def ttft_s(self, batch: int, num_prompt: int, num_output: int, share: float = 0.5) -> float:
        """Time to the first token that the `share` of requests keeps: the step under way, the own prompt, and the
        prompts before it, which come at random and take a part of all time: the wait of an M/D/1 queue, whose tail is
        taken to be exponential."""
        tpot, prefill = self.tpot_s(batch, num_prompt, num_output), self.prefill_s(num_prompt)
        busy = min(0.99, batch / max(1, num_output) * prefill / tpot)
        wait = prefill / (2 * (1 - busy)) * max(0.0, math.log(busy / (1 - share))) if busy else 0.0
        return self.decode_s(batch, num_prompt) + prefill + wait

    def _all_reduce_s(self, num_tokens: int) -> float:
        """Two of them a layer, of [num_tokens, hidden] in 16 bit; a ring moves 2 (n - 1) / n of it."""
        ranks, arch = self.work.ranks, self.work.architecture
        if ranks == 1:
            return 0.0
        hops = 2 * arch.num_layers * math.log2(ranks) * self.coefficients.hop_s
        moved = 2 * arch.num_layers * 2 * (ranks - 1) / ranks * num_tokens * arch.hidden_size * 2
        return hops + (moved / (self.machine.link_bytes_per_s * _LINK_SHARE) if self.machine.link_bytes_per_s else 0.0)
