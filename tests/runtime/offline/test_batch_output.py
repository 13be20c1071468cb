import contextlib
import json
import os
import resource
from collections.abc import Iterator

import pytest

from llmq.profiles.errors import FailedError, InputError
from llmq.runtime.offline import batch_output
from llmq.runtime.offline.batch_output import SYNC_LINES, BatchOutput, model_identity

JOB = {"input": "abc", "model": "m"}


def result(custom_id: str, status: int = 200) -> dict:
    return {"custom_id": custom_id, "response": {"status_code": status}}


def test_results_are_read_back_and_gone_on_with(tmp_path):
    path = tmp_path / "out.jsonl"
    with BatchOutput(path, JOB) as output:
        output.append("a", 200, result("a"))
        output.append("b", 400, result("b", 400))
    with BatchOutput(path, JOB) as output:
        assert output.statuses == {"a": 200, "b": 400}
        output.append("c", 200, result("c"))
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["a", "b", "c"]


def test_a_line_is_written_before_the_next_is_made(tmp_path):
    with BatchOutput(tmp_path / "out.jsonl", JOB) as output:
        output.append("a", 200, result("a"))
        assert (tmp_path / "out.jsonl").read_text().endswith("\n")


def test_a_torn_line_goes(tmp_path):
    path = tmp_path / "out.jsonl"
    with BatchOutput(path, JOB) as output:
        output.append("a", 200, result("a"))
    with open(path, "a") as file:
        file.write('{"custom_id": "b", "resp')
    with BatchOutput(path, JOB) as output:
        assert output.statuses == {"a": 200}
        output.append("b", 200, result("b"))
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["a", "b"]


def test_lines_are_synced_in_groups(tmp_path, monkeypatch):
    now_s, synced = [0.0], []
    with BatchOutput(tmp_path / "out.jsonl", JOB, clock=lambda: now_s[0]) as output:
        monkeypatch.setattr(batch_output.os, "fsync", lambda fd: synced.append(len(output.statuses)))
        for number in range(SYNC_LINES + 1):
            output.append(str(number), 200, result(str(number)))
        assert synced == [SYNC_LINES]
        now_s[0] = 1.5
        output.append("late", 200, result("late"))
        assert synced == [SYNC_LINES, SYNC_LINES + 2]
    assert synced[-1] == SYNC_LINES + 2


@pytest.mark.parametrize("name", ["input", "model"])
def test_another_job_is_refused_by_what_differs(tmp_path, name):
    path = tmp_path / "out.jsonl"
    with BatchOutput(path, JOB) as output:
        output.append("a", 200, result("a"))
    before = path.read_bytes()
    with pytest.raises(InputError, match=f"begun with another {name}"):
        BatchOutput(path, JOB | {name: "changed"})
    assert path.read_bytes() == before


def test_a_file_that_is_not_ours_is_left_alone(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("precious")
    with pytest.raises(InputError, match="not of this command"):
        BatchOutput(path, JOB)
    assert path.read_text() == "precious"


def test_results_that_were_edited_are_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    with BatchOutput(path, JOB):
        pass
    path.write_text("no result\n")
    with pytest.raises(InputError, match="not a result"):
        BatchOutput(path, JOB)


def test_one_process_at_a_time(tmp_path):
    with BatchOutput(tmp_path / "out.jsonl", JOB), pytest.raises(InputError, match="another llmq batch"):
        BatchOutput(tmp_path / "out.jsonl", JOB)


def test_nowhere_to_write_is_an_answer(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        BatchOutput(tmp_path / "no" / "out.jsonl", JOB)


def test_the_identity_of_a_model_is_of_its_content(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(os.urandom(3_000_000))
    (tmp_path / "README.md").write_text("one")
    before = model_identity(tmp_path)
    (tmp_path / "README.md").write_text("two")
    os.utime(weights, (0, 0))
    assert model_identity(tmp_path) == before
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert model_identity(tmp_path) != before


@contextlib.contextmanager
def room(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond that: what a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_and_gone_on_from(tmp_path):
    path = tmp_path / "out.jsonl"

    def write() -> None:
        with BatchOutput(path, JOB) as output:
            for number in range(9):
                output.append(str(number), 200, result(str(number)))

    with room(200), pytest.raises(FailedError, match=r"File too large.*the same command goes on"):
        write()
    assert len(path.read_bytes()) == 200
    assert not path.read_bytes().endswith(b"\n"), "a torn line: else this test shows nothing"
    with BatchOutput(path, JOB) as output:
        whole = len(output.statuses)
        assert 1 <= whole < 9
        output.append("last", 200, result("last"))
    lines = [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]
    assert lines == [*map(str, range(whole)), "last"]


def test_without_room_for_the_job_nothing_is_begun(tmp_path):
    with room(10), pytest.raises(FailedError, match="cannot be written"):
        BatchOutput(tmp_path / "out.jsonl", JOB)
    assert not list(tmp_path.glob("*.job*"))
    with BatchOutput(tmp_path / "out.jsonl", JOB) as output:
        assert output.statuses == {}
