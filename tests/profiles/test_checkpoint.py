import json

import numpy as np
import pytest
import safetensors.numpy

from llmq.profiles.checkpoint import find_model, read_checkpoint, read_config
from llmq.profiles.errors import InputError


def test_a_folder_is_found_and_read(bf16_folder):
    assert find_model(str(bf16_folder)) == bf16_folder
    checkpoint = read_checkpoint(bf16_folder)
    assert len(checkpoint.tensors) == 21
    assert checkpoint.total_bytes == 2 * sum(tensor.num_elements for tensor in checkpoint.tensors.values())
    assert checkpoint.architecture.num_kv_heads == 2
    assert checkpoint.quantization is None


def test_config_alone_is_enough_where_it_is_asked_for(bf16_folder):
    (bf16_folder / "model.safetensors").unlink()
    assert find_model(str(bf16_folder), config_only=True) == bf16_folder
    config = bf16_folder / "config.json"
    assert find_model(str(config), config_only=True) == config
    assert read_config(config) == read_config(bf16_folder)
    with pytest.raises(InputError, match=r"holds no \.safetensors weights"):
        find_model(str(bf16_folder))
    with pytest.raises(InputError, match="is a config alone; this needs the weights"):
        find_model(str(config))


def test_a_folder_without_config_is_no_model(tmp_path):
    with pytest.raises(InputError, match=r"holds no config\.json"):
        find_model(str(tmp_path))


def test_other_weights_are_named(bf16_folder):
    (bf16_folder / "model.safetensors").rename(bf16_folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"it holds pytorch_model\.bin, which llmq does not read"):
        find_model(str(bf16_folder))


@pytest.fixture
def sharded(bf16_folder):
    """The model's tensors over two files with an index."""
    path = bf16_folder / "model.safetensors"
    names = list(read_checkpoint(bf16_folder).tensors)
    path.unlink()
    files = {"model-00001-of-00002.safetensors": names[:10], "model-00002-of-00002.safetensors": names[10:]}
    for file, members in files.items():
        safetensors.numpy.save_file({name: np.zeros(4, np.float16) for name in members}, bf16_folder / file)
    index = {"weight_map": {name: file for file, members in files.items() for name in members}}
    (bf16_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return bf16_folder


def test_shards(sharded):
    tensors = read_checkpoint(sharded).tensors
    assert len(tensors) == 21
    assert {tensor.file for tensor in tensors.values()} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match=r"1 of 2 weight files are missing: model-00002-of-00002\.safetensors"):
        read_checkpoint(sharded)


def test_an_index_that_names_a_tensor_its_file_lacks(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"model\.extra\.weight is not in model-00001-of-00002\.safetensors"):
        read_checkpoint(sharded)


def test_a_broken_config(bf16_folder):
    (bf16_folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(InputError, match=r"config\.json is no JSON"):
        read_checkpoint(bf16_folder)


@pytest.mark.parametrize("place", ["top", "nested"])
def test_the_quantization_is_found(bf16_folder, place):
    config, scheme = read_config(bf16_folder), {"quant_method": "fp8"}
    config.update(
        {"quantization_config": scheme} if place == "top" else {"text_config": {"quantization_config": scheme}}
    )
    (bf16_folder / "config.json").write_text(json.dumps(config))
    assert read_checkpoint(bf16_folder).quantization == scheme


def test_autogptq_s_own_file_wins_over_config_json(bf16_folder):
    config = {**read_config(bf16_folder), "quantization_config": {"quant_method": "gptq", "group_size": -1, "bits": 4}}
    (bf16_folder / "config.json").write_text(json.dumps(config))
    (bf16_folder / "quantize_config.json").write_text(json.dumps({"group_size": 128}))
    assert read_checkpoint(bf16_folder).quantization == {"quant_method": "gptq", "group_size": 128, "bits": 4}


def test_checkpoints_of_other_libraries(shared):
    for folder in (shared / "interop").iterdir():
        if folder.is_dir():
            checkpoint = read_checkpoint(folder)
            assert (checkpoint.quantization is None) == (folder.name == "tiny-src")
            assert checkpoint.architecture.num_layers == 3
