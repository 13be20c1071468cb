import pytest

from llmq.evals.answer_log import AnswerLog, request_key
from llmq.profiles.errors import InputError

IDENTITY = {"model": {"sha256": "aa"}, "options": {"limit": 4}}


def test_answers_outlive_the_process_and_a_torn_line_is_cut_off(tmp_path):
    path = tmp_path / "run.jsonl"
    with AnswerLog.open(path, IDENTITY) as log:
        log.add("a", [-1.5, True])
        log.add("b", {"text": "x\ny", "finish_reason": "stop"})
    path.write_bytes(path.read_bytes() + b'{"key": "c", "ans')
    with AnswerLog.open(path, IDENTITY) as log:
        assert (log.find("a"), log.find("b"), log.find("c")) == (
            [-1.5, True],
            {"text": "x\ny", "finish_reason": "stop"},
            None,
        )
        assert log.num_reused == 2
        log.add("c", [0.0, False])
    with AnswerLog.open(path, IDENTITY) as log:
        assert len(log) == 3


def test_answers_of_something_else_are_refused_with_what_differs(tmp_path):
    path = tmp_path / "run.jsonl"
    with AnswerLog.open(path, IDENTITY) as log:
        log.add("a", [0.0, True])
    with pytest.raises(InputError, match=r"1 answers of another run:\n  model.sha256 was \"aa\", is \"bb\"\n  options"):
        AnswerLog.open(path, {"model": {"sha256": "bb"}, "options": {"limit": 5}})


def test_a_file_without_an_answer_is_taken_over(tmp_path):
    path = tmp_path / "run.jsonl"
    AnswerLog.open(path, IDENTITY).close()
    path.write_bytes(path.read_bytes()[:10])
    AnswerLog.open(path, IDENTITY).close()
    with AnswerLog.open(path, {"model": "other"}) as log:
        assert len(log) == 0


def test_two_runs_at_once_do_not_share_a_file(tmp_path):
    with AnswerLog.open(tmp_path / "run.jsonl", IDENTITY), pytest.raises(InputError, match="another llmq eval"):
        AnswerLog.open(tmp_path / "run.jsonl", IDENTITY)


def test_keys_differ_with_anything_that_decides_an_answer():
    keys = {request_key("likelihood", ids, start) for ids in ([1, 2], [1, 2, 3]) for start in (1, 2)}
    assert len(keys) == 4
    assert request_key("generation", [1], {"top_p": 0.5, "seed": 1}) == request_key(
        "generation", [1], {"seed": 1, "top_p": 0.5}
    )


def test_without_a_file_nothing_is_kept():
    log = AnswerLog()
    log.add("a", 1)
    assert log.find("a") is None
