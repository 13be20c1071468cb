import multiprocessing
import time
from pathlib import Path

import pytest

from llmq.profiles.cache import cache_dir, locked, require_free_space, whole_folder
from llmq.profiles.errors import FailedError


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/llmq")
    monkeypatch.setenv("LLMQ_CACHE", "~/own")
    assert cache_dir() == Path.home() / "own"
    monkeypatch.delenv("LLMQ_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache/llmq"


def test_a_folder_appears_whole(tmp_path):
    target = tmp_path / "model"
    with locked(target), whole_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == ["model"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, ValueError])
def test_or_not_at_all(tmp_path, interruption):
    target = tmp_path / "model"

    def make() -> None:
        with locked(target), whole_folder(target) as folder:
            (folder / "a").write_text("1")
            raise interruption

    with pytest.raises(interruption):
        make()
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]


def test_what_a_killed_process_left_is_cleared(tmp_path):
    stale = tmp_path / ".model.partial"
    stale.mkdir()
    (stale / "half").write_text("x")
    with whole_folder(tmp_path / "model"):
        pass
    assert list((tmp_path / "model").iterdir()) == []


def _make_once(target: Path, log: Path) -> None:
    with locked(target):
        if not target.exists():
            with whole_folder(target):
                time.sleep(0.2)
                with open(log, "a") as file:
                    file.write("made\n")


def test_two_processes_make_it_once(tmp_path):
    target, log = tmp_path / "model", tmp_path / "log"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_make_once, args=(target, log)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert log.read_text() == "made\n"


def test_a_full_disk_is_found_out_before_work(tmp_path):
    require_free_space(tmp_path / "not" / "there", 1, "nothing")
    with pytest.raises(FailedError, match=r"the copy needs 1,048,576\.0 TiB in .* set LLMQ_CACHE"):
        require_free_space(tmp_path, 2**60, "the copy")
