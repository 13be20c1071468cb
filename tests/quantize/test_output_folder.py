"""Whole or not at all; and everything of the source that is not its weights."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from llmq.profiles.errors import FailedError
from llmq.profiles.safetensors_file import TensorInfo
from llmq.quantize.output_folder import StoredTensor, appearing_whole, copy_companions, write_tensors


def test_the_folder_appears_at_the_end_only(tmp_path):
    out = tmp_path / "deep" / "out"
    with appearing_whole(out) as folder:
        (folder / "a").write_text("1")
        assert not out.exists()
        assert folder.name.startswith(".")
    assert (out / "a").read_text() == "1"
    assert os.listdir(out.parent) == ["out"]


def write_then(out, action):
    with appearing_whole(out) as folder:
        (folder / "a").write_text("1")
        action()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path, error):
    def fail():
        raise error

    with pytest.raises(error):
        write_then(tmp_path / "out", fail)
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_left_is_removed(tmp_path):
    dead = tmp_path / ".out.partial-999999999"
    dead.mkdir()
    alive = tmp_path / f".out.partial-{os.getppid()}"
    alive.mkdir()
    with appearing_whole(tmp_path / "out"):
        assert not dead.exists()
        assert alive.exists()


def test_a_folder_made_meanwhile_is_not_overwritten(tmp_path):
    out = tmp_path / "out"

    def somebody_else():
        out.mkdir()
        (out / "theirs").touch()

    with pytest.raises(FailedError, match="meanwhile"):
        write_then(out, somebody_else)
    assert os.listdir(out) == ["theirs"]


def test_companions_are_all_but_weights_and_config(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    kept = ["tokenizer.json", "chat_template.jinja", "generation_config.json", "special.txt", "tokenizer.model"]
    for name in [*kept, "config.json", "model.safetensors", "pytorch_model.bin", ".gitattributes", "a.gguf"]:
        (source / name).write_text(name)
    (source / "onnx").mkdir()
    assert sorted(copy_companions(source, target)) == sorted(kept)
    assert sorted(os.listdir(target)) == sorted(kept)


def stored(name, tensor):
    info = TensorInfo(name, "F32", tuple(tensor.shape), tensor.nbytes, "")
    return StoredTensor(info, lambda: tensor)


def test_one_file_where_it_fits(tmp_path):
    tmp_path.chmod(0o755)
    shared = torch.arange(8.0)
    # b shares storage with a, c is no piece of memory at all, d has no dimension
    tensors = {"a": shared[:4], "b": shared, "c": shared.view(2, 4).T, "d": shared[3]}
    assert write_tensors(tmp_path, [stored(*item) for item in tensors.items()]) == 4 * (4 + 8 + 8 + 1)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o666 == tmp_path.stat().st_mode & 0o666
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_several_files_get_an_index(tmp_path):
    write_tensors(tmp_path, [stored(name, torch.zeros(20)) for name in "abc"], max_shard_bytes=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 240
    assert index["weight_map"]["c"] == "model-00003-of-00003.safetensors"
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / file)


def test_a_tensor_that_is_not_what_was_announced_stops_the_writing(tmp_path):
    tensor = stored("a", torch.zeros(20))
    with pytest.raises(ValueError, match="announced"):
        write_tensors(tmp_path, [replace(tensor, read=lambda: torch.zeros(21))])
