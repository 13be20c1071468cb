"""Quantize with AutoGPTQ 0.7.1. Run by the Python of an environment that has it: `autogptq_job.py JOB.json`.

Nothing of ours is imported: the two environments share files only (see `archived.py` for JOB.json and the answer).
"""

import json
import logging
import sys
from typing import Any

import torch
from auto_gptq import AutoGPTQForCausalLM, BaseQuantizeConfig
from auto_gptq.modeling import _base
from auto_gptq.quantization import GPTQ


class ReportingGPTQ(GPTQ):
    """The library's own solver, overheard: what became of each linear is in `measured`, in the order of the work."""

    measured: list[dict[str, Any]] = []  # noqa: RUF012 (one list for all instances is what is meant)

    def fasterquant(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        before, hessian = self.layer.weight.data.float().clone(), self.H.clone()
        found = super().fasterquant(**options)
        delta = self.layer.weight.data.float() - before
        self.measured.append(
            {
                "weight_error": float(delta.square().sum() / before.square().sum().clamp(min=1e-30)),
                # H is 2 E[x x^T]: the factor cancels.
                "output_error": float(
                    ((delta @ hessian) * delta).sum() / ((before @ hessian) * before).sum().clamp(min=1e-30)
                ),
                "dead_inputs": int((torch.diag(hessian) == 0).sum()),
            }
        )
        return found


class LayerCounter(logging.Handler):
    """The library says where it is in its log, and nowhere else."""

    def emit(self, record: logging.LogRecord) -> None:
        words = record.getMessage().split()
        if words[:3] == ["Start", "quantizing", "layer"]:
            number, total = map(int, words[3].split("/"))
            say(number - 1, total)


def say(done: int, total: int) -> None:
    print(json.dumps({"done": done, "total": total}), flush=True)


def main(path: str) -> None:
    with open(path) as file:
        job = json.load(file)
    logging.getLogger("auto_gptq").setLevel(logging.INFO)
    logging.getLogger("auto_gptq").addHandler(LayerCounter())
    _base.GPTQ = ReportingGPTQ
    config = BaseQuantizeConfig(
        bits=job["bits"],
        group_size=job["group_size"],
        sym=job["symmetric"],
        damp_percent=job["settings"]["damping"],
        desc_act=job["settings"]["activation_order"],
        true_sequential=job["settings"]["true_sequential"],
    )
    model = AutoGPTQForCausalLM.from_pretrained(job["source"], config, torch_dtype=getattr(torch, job["dtype"]))
    kept = [[name for name in group if name not in job["left_out"]] for group in model.inside_layer_modules]
    model.inside_layer_modules = [group for group in kept if group]
    examples = [{"input_ids": [ids], "attention_mask": [[1] * len(ids)]} for ids in job["samples"]]
    model.quantize(
        [{name: torch.tensor(rows) for name, rows in example.items()} for example in examples],
        cache_examples_on_gpu=False,
    )
    model.save_quantized(job["out"])
    num_layers = model.config.num_hidden_layers
    say(num_layers, num_layers)
    names = [
        f"model.layers.{index}.{name}"
        for index in range(num_layers)
        for group in model.inside_layer_modules
        for name in group
    ]
    num_tokens = sum(map(len, job["samples"]))
    linears = {
        name: {**measured, "num_tokens": num_tokens}
        for name, measured in zip(names, ReportingGPTQ.measured, strict=True)
    }
    with open(job["answer"], "w") as file:
        json.dump({"linears": linears, "scalings": []}, file)


if __name__ == "__main__":
    main(sys.argv[1])
