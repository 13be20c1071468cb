"""Model FLOPs utilization of a measured load."""

from dataclasses import dataclass

from llmq.profiles.load.measurement import Measurement
from llmq.profiles.roofline import DecoderWork, Machine


@dataclass(frozen=True)
class Utilization:
    """What the model needs for a token, and what one of its `work.ranks` machines computes at most."""

    work: DecoderWork
    machine: Machine

    def __str__(self) -> str:
        ranks = f"{self.work.ranks} × " if self.work.ranks > 1 else ""
        return f"{ranks}{self.machine.name}, {self.machine.flops_per_s / 1e12:,.4g} TFLOP/s"

    def mfu(self, one: Measurement) -> float | None:
        """FLOPs that the answered requests need (PaLM, Chowdhery et al. 2022, appendix B: what the model needs, nothing
        computed twice; prompt tokens found in a prefix cache need none), over peak and the measured time. None: no
        request was answered."""
        if not one.summary.duration_s or not one.answered:
            return None
        flops = sum(
            self.work.request_flops(
                record.num_prompt_tokens, max(1, record.num_output_tokens), record.num_cached_tokens
            )
            for _, record in one.answered
        )
        return flops / (one.summary.duration_s * self.machine.flops_per_s * self.work.ranks)
