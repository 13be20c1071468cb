import json
import struct

import numpy as np
import pytest
import safetensors.numpy

from llmq.profiles.errors import InputError
from llmq.profiles.safetensors_file import TensorInfo, read_header, write_file


def test_reads_what_the_safetensors_library_writes(tmp_path):
    tensors = {"a": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.int8), "scalar": np.array(1, np.float16)}
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    assert header["a"] == TensorInfo("a", "F32", (3, 5), 60, "x.safetensors")
    assert header["b"].num_bytes == 7
    assert header["scalar"].shape == ()
    assert header["scalar"].num_elements == 1


def test_the_safetensors_library_reads_what_is_written_here(tmp_path):
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.int32)
    infos = [TensorInfo("first", "F32", (2, 3), 24, "x"), TensorInfo("second", "I32", (4,), 16, "x")]
    data = first.tobytes() + second.tobytes()
    # Chunks may cut a tensor anywhere.
    write_file(tmp_path / "x.safetensors", infos, iter([data[:10], data[10:30], data[30:]]))
    loaded = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(loaded["first"], first)
    np.testing.assert_array_equal(loaded["second"], second)


def test_fewer_bytes_than_declared_are_not_passed_over(tmp_path):
    with pytest.raises(ValueError, match="10 bytes of tensors written, 24 declared"):
        write_file(tmp_path / "x", [TensorInfo("a", "F32", (2, 3), 24, "x")], iter([b"0123456789"]))


def _saved(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(100, np.float32)}, path)
    return path


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (-1, "cut short: .* fetch it again"),
        (40, "cut short inside its header"),
        (3, "no safetensors file"),
        (0, "no safetensors file"),
    ],
)
def test_truncated(tmp_path, keep, message):
    path = _saved(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=message):
        read_header(path)


def test_longer_than_declared(tmp_path):
    path = _saved(tmp_path)
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(InputError, match="longer than its header says"):
        read_header(path)


@pytest.mark.parametrize("header", [b"not json!", json.dumps({"a": {"dtype": "F32"}}).encode(), b"[1, 2]"])
def test_a_header_that_cannot_be_read(tmp_path, header):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(InputError, match="its safetensors header cannot be read"):
        read_header(path)


def test_a_git_lfs_pointer_is_no_safetensors_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n")
    with pytest.raises(InputError, match="no safetensors file"):
        read_header(path)
