"""Greedy tokens of checkpoints by transformers alone: `consumer_transformers.py JOB.json`; see `bench_consumers.py`."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AwqConfig, GPTQConfig


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """By forwards and argmax: `generate` would take penalties and samplers from the folder. Prompts of one length."""
    ids, cache, steps = torch.tensor(prompts), None, []
    while len(steps) < num_tokens:
        output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        ids = output.logits[:, -1].argmax(-1, keepdim=True)
        steps.append(ids)
    return torch.cat(steps, dim=1).tolist()


def plain_kernel(folder: str) -> dict[str, Any]:
    """gptqmodel's own choice on a CPU computes in bf16, whatever the model was loaded in. These dequantize to fp16:
    GPTQ's then multiplies in float32, AWQ's in fp16."""
    quantization = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
    match quantization["quant_method"]:
        case "gptq":
            return {"quantization_config": GPTQConfig(bits=quantization["bits"], backend="gptq_torch")}
        case "awq":
            return {"quantization_config": AwqConfig(bits=quantization["bits"], backend="torch_awq")}
    return {}


def main(path: str) -> None:
    with open(path) as file:
        job = json.load(file)
    torch.set_num_threads(job["threads"])
    for name, folder in job["folders"].items():
        print(json.dumps({"started": name}), flush=True)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, **plain_kernel(folder)
            ).eval()
            answer = {"tokens": generate(model, job["prompts"], job["num_tokens"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"name": name, **answer}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
