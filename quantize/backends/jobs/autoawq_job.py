"""Quantize with AutoAWQ 0.2.9. Run by the Python of an environment that has it: `autoawq_job.py JOB.json`.

Nothing of ours is imported: the two environments share files only (see `archived.py` for JOB.json and the answer).
"""

import json
import sys
from typing import Any

import torch
from awq import AutoAWQForCausalLM
from awq.quantize.quantizer import AwqQuantizer
from torch import Tensor, nn

GRID = 20  # scales that the library tries: alpha = 0, 1/20 … 19/20


class ReportingQuantizer(AwqQuantizer):
    """The library's own quantizer, overheard: what it did to each layer is kept in `linears` and `scalings`."""

    linears: dict[str, dict[str, Any]]
    scalings: list[dict[str, Any]]

    def quantize(self) -> None:
        self.linears, self.scalings, self._index = {}, [], -1
        super().quantize()
        say(len(self.modules), len(self.modules))

    def _get_input_feat(self, layer: nn.Module, named_linears: dict[str, nn.Linear]) -> dict[str, Tensor]:
        self._index += 1
        say(self._index, len(self.modules))
        return super()._get_input_feat(layer, named_linears)

    def _search_best_scale(self, *args: Any, **kwargs: Any) -> tuple[str, tuple[str, ...], Tensor]:
        self._losses: list[float] = []
        source, linears, scales = super()._search_best_scale(*args, **kwargs)
        best = min(range(len(self._losses)), key=self._losses.__getitem__)
        found = {"alpha": best / GRID, "error": self._losses[best]}
        self.scalings.append({"layer": self._index, "source": source, "linears": linears, **found})
        return source, linears, scales

    def _compute_loss(self, reference: Tensor, output: Tensor, device: torch.device) -> float:
        loss = super()._compute_loss(reference, output, device)
        self._losses.append(loss / max(float(reference.float().square().mean()), 1e-30))
        return loss

    def _search_best_clip(
        self, layer: nn.Module, named_linears: dict[str, nn.Linear], input_feat: dict[str, Tensor]
    ) -> list[Any]:
        # Here the scales are in the weights and out of the inputs, and nothing is rounded or clipped yet.
        self._scaled = {name: linear.weight.detach().float().clone() for name, linear in named_linears.items()}
        self._inputs = {name: input_feat[name].flatten(0, -2).float() for name in named_linears}
        return super()._search_best_clip(layer, named_linears, input_feat)

    def _apply_quant(self, module: nn.Module, named_linears: dict[str, nn.Linear]) -> None:
        super()._apply_quant(module, named_linears)
        for name, linear in named_linears.items():
            scaled, x = self._scaled[name], self._inputs[name]
            delta = linear.weight.detach().to(scaled.device).float() - scaled
            x = x.to(scaled.device)
            self.linears[f"model.layers.{self._index}.{name}"] = {
                "weight_error": ratio(delta, scaled),
                "output_error": ratio(x @ delta.T, x @ scaled.T),
                "dead_inputs": int((x == 0).all(0).sum()),
                "num_tokens": x.shape[0],
            }


def ratio(delta: Tensor, reference: Tensor) -> float:
    """|delta|^2 / |reference|^2"""
    return float(delta.square().sum() / reference.square().sum().clamp(min=1e-30))


def say(done: int, total: int) -> None:
    print(json.dumps({"done": done, "total": total}), flush=True)


def main(path: str) -> None:
    with open(path) as file:
        job = json.load(file)
    model = AutoAWQForCausalLM.from_pretrained(
        job["source"], torch_dtype=getattr(torch, job["dtype"]), trust_remote_code=False
    )
    model.quantize(
        None,
        {"zero_point": True, "q_group_size": job["group_size"], "w_bit": job["bits"], "version": "GEMM"},
        calib_data=job["samples"],
        max_calib_samples=len(job["samples"]),
        max_calib_seq_len=job["seq_len"],
        n_parallel_calib_samples=job["samples_at_once"],
        quantizer_cls=ReportingQuantizer,
    )
    model.save_quantized(job["out"])
    with open(job["answer"], "w") as file:
        json.dump({"linears": model.quantizer.linears, "scalings": model.quantizer.scalings}, file)


if __name__ == "__main__":
    main(sys.argv[1])
