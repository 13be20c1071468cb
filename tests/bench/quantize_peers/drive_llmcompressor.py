"""llm-compressor's `oneshot`, its documented recipes: GPTQ or AWQ (4 and 3 bits), SmoothQuant and GPTQ (W8A8), FP8
dynamic."""

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from dense import decompressed_state, save_changed
from job import Job, Meter, Scheme
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    job = Job.from_command_line()
    meter = Meter(job)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype))
    is_calibrated = job.scheme.kind == "int"
    oneshot(
        model=model,
        recipe=modifiers(job.scheme, **job.options),
        dataset=data_loader(job.samples) if is_calibrated else None,
        pipeline="sequential" if is_calibrated else "datafree",
    )
    model.save_pretrained(job.checkpoint, save_compressed=True)
    AutoTokenizer.from_pretrained(job.model).save_pretrained(job.checkpoint)
    meter.stop()
    del model
    save_changed(job, decompressed_state(job.checkpoint))


def modifiers(scheme: Scheme, method: str = "gptq") -> list:
    weights = QuantizationArgs(
        num_bits=scheme.bits,
        type=scheme.kind,
        symmetric=scheme.symmetric,
        strategy="group" if scheme.group_size else "channel",
        group_size=scheme.group_size,
    )
    activations = None
    if scheme.activations:
        activations = QuantizationArgs(num_bits=8, type=scheme.kind, symmetric=True, strategy="token", dynamic=True)
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)}
    if scheme.kind == "float":
        return [QuantizationModifier(config_groups=groups, ignore=["lm_head"])]
    if method == "awq":
        return [AWQModifier(), QuantizationModifier(config_groups=groups, ignore=["lm_head"])]
    gptq = GPTQModifier(config_groups=groups, ignore=["lm_head"])
    return [SmoothQuantModifier(smoothing_strength=0.8), gptq] if scheme.activations else [gptq]


def data_loader(samples: list[list[int]]) -> DataLoader:
    """One sample a batch, as long as it is."""
    batches = [{"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()} for ids in samples]
    return DataLoader(batches, batch_size=None, shuffle=False)


if __name__ == "__main__":
    main()
