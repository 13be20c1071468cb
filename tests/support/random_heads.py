"""Random heads that guess, EAGLE's and Medusa's, in folders as they are published."""

import json

import torch
from safetensors.torch import save_file

from llmq.runtime.speculative.medusa import FILE

HIDDEN, VOCAB, HEADS = 64, 512, 3


def save_head(folder, base, *, own_embedding: bool = False, bias: bool = False, **config):
    """A random head of one layer for the model in `base`, which has as many KV heads unless `config` says otherwise."""
    from transformers import AutoConfig, LlamaForCausalLM

    torch.manual_seed(1)
    settings = AutoConfig.from_pretrained(base)
    settings.update({"num_hidden_layers": 1, "initializer_range": 0.2, **config})
    layer = LlamaForCausalLM(settings).state_dict()
    tensors = {name.removeprefix("model."): tensor for name, tensor in layer.items() if ".layers." in name}
    del tensors["layers.0.input_layernorm.weight"]
    tensors["fc.weight"] = torch.randn(settings.hidden_size, 2 * settings.hidden_size) / 8
    if bias:
        tensors["fc.bias"] = torch.randn(settings.hidden_size)
    if own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(settings.vocab_size, settings.hidden_size)
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**settings.to_dict(), "model_type": "llama"}, default=str))
    return folder


def save_heads(folder, tensors) -> None:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE)


def random_heads(num_layers: int = 1, words: int = VOCAB, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for head in range(HEADS):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=draw) / 8
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(HIDDEN, generator=draw)
        tensors[f"{head}.{num_layers}.weight"] = torch.randn(words, HIDDEN, generator=draw)
    return tensors
