"""Packed weights on disk: believed only when whole and made of these very weights."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from llmq.profiles.checkpoint import read_checkpoint
from llmq.runtime import packed_cache
from llmq.runtime.packed_cache import FOLDER, PackedCache, PackedEntry, checksum

SETTINGS = {"isa": "avx2"}
YEAR_AGO_S = time.time() - 365 * 86400


def entries(seed: int = 0) -> dict[str, PackedEntry]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for number in range(3):
        tensors = {
            "numbers": torch.randint(0, 256, (7 + number, 641), dtype=torch.uint8, generator=generator),
            "scales": torch.randn(5, 3, 16, generator=generator).to(torch.bfloat16),
            "order": torch.randperm(33, generator=generator).to(torch.int32),
        }
        found[f"layer.{number}"] = PackedEntry({"group_size": 64, "input_scale": 0.1 * number}, tensors)
    return found


def save(folder: Path, seed: int = 0, code: str = "1", **others: str) -> PackedCache:
    cache = PackedCache(read_checkpoint(folder), SETTINGS | others, code)
    for name, entry in entries(seed).items():
        cache.add(name, entry)
    cache.save()
    return cache


def find(folder: Path, code: str = "1", **others: str) -> dict[str, PackedEntry]:
    cache = PackedCache(read_checkpoint(folder), SETTINGS | others, code)
    return {name: found for name in entries() if (found := cache.find(name)) is not None}


def is_equal(found: dict[str, PackedEntry], expected: dict[str, PackedEntry]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].facts == entry.facts
        and found[name].tensors.keys() == entry.tensors.keys()
        and all(
            torch.equal(found[name].tensors[key], tensor) and found[name].tensors[key].dtype == tensor.dtype
            for key, tensor in entry.tensors.items()
        )
        for name, entry in expected.items()
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "_LEAST_BYTES", 0)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkpoint of two files that have lain there for long."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    for name in ("model-1.safetensors", "model-2.safetensors"):
        save_file({name: torch.arange(3000, dtype=torch.float32)}, made / name)
    return made


def files(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("*.bin"))


def test_what_is_kept_is_found_aligned_and_mapped(folder):
    assert find(folder) == {}
    cache = save(folder)
    assert str(files(folder)[0]) in cache.said
    found = find(folder)
    assert is_equal(found, entries())
    assert all(tensor.data_ptr() % 64 == 0 for entry in found.values() for tensor in entry.tensors.values())
    mapped = Path("/proc/self/maps").read_text()
    assert str(files(folder)[0]) in mapped


def test_nothing_is_written_where_all_was_found(folder):
    save(folder)
    before = files(folder)[0].stat().st_mtime_ns
    PackedCache(read_checkpoint(folder), SETTINGS, "1").save()
    assert files(folder)[0].stat().st_mtime_ns == before


def test_what_was_missing_joins_what_was_found(folder):
    save(folder)
    cache = PackedCache(read_checkpoint(folder), SETTINGS, "1")
    cache.add("head", PackedEntry({}, {"numbers": torch.ones(3)}))
    cache.save()
    assert is_equal(find(folder), entries())
    assert torch.equal(
        PackedCache(read_checkpoint(folder), SETTINGS, "1").find("head").tensors["numbers"], torch.ones(3)
    )


def test_other_settings_code_or_config_are_other_weights(folder):
    save(folder)
    assert find(folder, isa="avx512_vnni") == {}
    assert find(folder, code="2") == {}
    save(folder, seed=1, isa="avx512_vnni")  # beside the first
    assert is_equal(find(folder), entries(0))
    assert is_equal(find(folder, isa="avx512_vnni"), entries(1))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 65}))
    assert find(folder) == {}


@settings(max_examples=30, deadline=None)
@given(place=st.integers(0, 2**20), bit=st.integers(0, 7), which=st.integers(0, 1), old=st.booleans())
def test_any_changed_bit_of_the_weights_is_noticed_whatever_their_times(tmp_path_factory, place, bit, which, old):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    weights = [folder / f"model-{number}.safetensors" for number in range(2)]
    for path in weights:
        save_file({path.name: torch.arange(3000, dtype=torch.float32)}, path)
    if old:
        os.utime(weights[which], (YEAR_AGO_S, YEAR_AGO_S))
    save(folder)
    assert is_equal(find(folder), entries())
    stat, content = weights[which].stat(), bytearray(weights[which].read_bytes())
    data = 8 + int.from_bytes(content[:8], "little")  # the header must still be one
    content[data + place % (len(content) - data)] ^= 1 << bit
    weights[which].write_bytes(content)
    os.utime(weights[which], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert find(folder) == {}


def test_the_same_weights_under_other_times_are_the_same(folder, tmp_path):
    save(folder)
    shutil.copytree(folder, tmp_path / "copy")
    assert is_equal(find(tmp_path / "copy"), entries())
    os.utime(folder / "model-1.safetensors")
    assert is_equal(find(folder), entries())


def test_a_file_that_changed_just_now_is_compared_by_its_bytes(folder, monkeypatch):
    save(folder)
    assert b'"files": null' in files(folder)[0].read_bytes()
    later = time.time_ns() + 10_000_000_000
    monkeypatch.setattr("llmq.runtime.packed_cache.time.time_ns", lambda: later)
    save(folder, isa="other")
    monkeypatch.setattr("llmq.runtime.packed_cache._content", lambda checkpoint: pytest.fail("read all weights"))
    assert is_equal(find(folder, isa="other"), entries())


def test_weights_that_change_while_they_are_read_are_not_kept(folder):
    cache = PackedCache(read_checkpoint(folder), SETTINGS, "1")
    cache.add("layer.0", entries()["layer.0"])
    save_file({"other": torch.zeros(3000)}, folder / "model-1.safetensors")
    cache.save()
    assert "changed" in cache.said
    assert find(folder) == {}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_remade_never_trusted(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    save_file({"x": torch.arange(300, dtype=torch.float32)}, folder / "model.safetensors")
    save(folder)
    (path,) = files(folder)
    content = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["bit", "cut", "longer", "zeros"]))
    place = data.draw(st.integers(0, len(content) - 1))
    if kind == "bit":
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del content[place:]
    elif kind == "longer":
        content += bytes(data.draw(st.integers(1, 9000)))
    else:  # a page that never reached the disk
        content[place // 4096 * 4096 : place // 4096 * 4096 + 4096] = bytes(4096)
    is_changed = bytes(content) != path.read_bytes()
    path.write_bytes(content)
    found = find(folder)
    assert found == {} or is_equal(found, entries())  # a hole between tensors may hold anything that adds up
    if kind in ("cut", "longer") and is_changed:
        assert found == {}
    save(folder)
    assert is_equal(find(folder), entries())


def test_a_foreign_file_of_that_name_is_no_reason_to_fail(folder):
    save(folder)
    for content in (b"", b"llmq packed weights 1\n", b"llmq packed weights 1\n" + b"\xff" * 8, os.urandom(10_000)):
        files(folder)[0].write_bytes(content)
        assert find(folder) == {}


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_packed_cache as tests
from llmq.runtime import packed_cache
packed_cache._LEAST_BYTES = 0
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
{patch}
tests.save(Path(sys.argv[1]), seed=1)
"""


@pytest.mark.parametrize(
    "patch",
    [
        "packed_cache.checksum = lambda pieces: die() if sum(map(len, pieces)) > 12_000 + 4096 else ''",
        "os.replace = die",
        "os.fsync = die",
    ],
    ids=["the tensors written", "whole, not renamed", "not on the disk"],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_killed_in_the_middle_of_writing(folder, patch, is_there):
    if is_there:
        save(folder)
    script = KILLED.format(tests=str(Path(__file__).parent), patch=patch)
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert is_equal(find(folder), entries() if is_there else {})
    save(folder)
    assert is_equal(find(folder), entries())
    assert [path.name for path in (folder / FOLDER).iterdir() if "partial" in path.name] == []


WRITER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_packed_cache as tests
tests.packed_cache._LEAST_BYTES = 0
for _ in range(20):
    tests.save(Path(sys.argv[1]))
    assert tests.is_equal(tests.find(Path(sys.argv[1])), tests.entries())
"""


def test_writers_and_readers_at_once(folder):
    script = WRITER.format(tests=str(Path(__file__).parent))
    running = [subprocess.Popen([sys.executable, "-c", script, str(folder)], stderr=subprocess.PIPE) for _ in range(4)]
    for process in running:
        _, error = process.communicate()
        assert process.returncode == 0, error.decode()
    assert is_equal(find(folder), entries())


def test_a_mapped_file_outlives_its_successor(folder):
    save(folder)
    found = find(folder)
    save(folder, seed=1, code="2")  # of the same name
    assert len(files(folder)) == 1
    assert is_equal(found, entries(0))
    assert is_equal(find(folder, code="2"), entries(1))


def test_a_folder_that_cannot_be_written_to_has_its_own_in_the_cache(folder, tmp_path):
    (folder / FOLDER).write_text("not a folder")  # also for root, who may write everywhere
    cache = save(folder)
    assert str(tmp_path / "cache") in cache.said
    assert is_equal(find(folder), entries())
    (tmp_path / "cache" / "packed").rename(tmp_path / "moved")
    (tmp_path / "cache" / "packed").write_text("nor this")
    cache = save(folder)
    assert cache.said.startswith("not kept (")
    assert find(folder) == {}


def test_nothing_is_kept_of_a_small_model_or_on_a_full_disk(folder, monkeypatch):
    monkeypatch.setattr(packed_cache.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 30_000))
    assert "half of what is free" in save(folder).said
    monkeypatch.undo()
    assert save(folder).said == ""
    assert files(folder) == []


def test_the_checksum_notices_exchanged_pages():
    data = torch.arange(3 * 4096 // 8, dtype=torch.int64).view(torch.uint8)
    data = torch.cat([data, torch.ones(5, dtype=torch.uint8)])
    exchanged = torch.cat([data[4096:8192], data[:4096], data[8192:]])
    assert checksum([data]) != checksum([exchanged])
    assert checksum([data]) != checksum([data[:-1]])
    assert checksum([data]) == checksum([data[:4096], data[4096:]])
