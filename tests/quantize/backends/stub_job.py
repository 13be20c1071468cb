"""Stands for an archived library: rounds to nearest and stores it in the AWQ GEMM layout, packed anew here.

What it does is in job["settings"]["doing"]: "work", or how to fail. It imports numpy and safetensors only.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # eight columns of a word, lowest bits first


def pack(numbers):
    """[rows, n] of 0 .. 15 -> int32 [rows, n / 8]"""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), dtype=np.uint32)
    for position, column in enumerate(ORDER):
        words |= numbers[:, column::8].astype(np.uint32) << np.uint32(4 * position)
    return words.view(np.int32)


def quantize(weight, group_size):
    """[out, in] -> the layout's qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]"""
    grouped = weight.reshape(len(weight), -1, group_size)
    low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
    scales = ((high - low) / 15).astype(np.float16)
    zeros = np.clip(np.round(-low / scales.astype(np.float32)), 0, 15)
    numbers = np.round(grouped / scales[..., None].astype(np.float32)) + zeros[..., None]
    numbers = np.clip(numbers, 0, 15).reshape(weight.shape)
    return {"qweight": pack(numbers.T), "qzeros": pack(zeros.T), "scales": np.ascontiguousarray(scales.T)}


def read_bf16(path):
    """Every tensor, as float32: numpy has no bf16."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        tensors = {}
        for name, entry in header.items():
            if name != "__metadata__":
                file.seek(start + entry["data_offsets"][0])
                raw = file.read(entry["data_offsets"][1] - entry["data_offsets"][0])
                bits = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
                tensors[name] = bits.view(np.float32).reshape(entry["shape"])
    return tensors


def main(path):
    with open(path) as file:
        job = json.load(file)
    doing = job["settings"]["doing"]
    print("a library may print what it likes")
    print(json.dumps({"done": 0, "total": 2}), flush=True)
    if doing == "fail":
        raise AssertionError("a zero dimension")
    if doing == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    source, out = Path(job["source"]), Path(job["out"])
    tensors, answer = {}, {"linears": {}, "scalings": []}
    for name, tensor in read_bf16(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if ".layers." not in name or tensor.ndim == 1:
            # A norm that took a scale, as AWQ's do.
            tensors[name] = tensor * 2 if name == "model.layers.1.input_layernorm.weight" else tensor
            continue
        scaled = tensor / 2 if module.startswith("model.layers.1.self_attn") and "o_proj" not in module else tensor
        parts = quantize(scaled, job["group_size"])
        tensors |= {f"{module}.{part}": value for part, value in parts.items()}
        answer["linears"][module] = {"weight_error": 0.01, "output_error": 0.02, "num_tokens": 7, "dead_inputs": 0}
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    scaling = {"layer": 1, "source": "input_layernorm", "linears": names, "alpha": 0.5, "error": 0.02}
    answer["scalings"].append(scaling)
    if doing == "forget":
        del answer["linears"]["model.layers.1.mlp.down_proj"]
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": job["bits"],
        "group_size": job["group_size"],
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": None,
    }
    (out / "config.json").write_text(json.dumps(config))
    Path(job["answer"]).write_text(json.dumps(answer))
    if kept := job["settings"].get("keep"):
        Path(kept).write_text(json.dumps({**job, "config": config, "cuda": os.environ.get("CUDA_VISIBLE_DEVICES")}))
        with safe_open(out / "model.safetensors", "np") as written:
            save_file({name: written.get_tensor(name) for name in written.keys()}, f"{kept}.safetensors")  # noqa: SIM118
    print(json.dumps({"done": 2, "total": 2}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
