import json

import pytest

from llmq.profiles.errors import InputError
from llmq.runtime.offline.batch_file import BatchFile, parse_request
from llmq.runtime.server.errors import ApiError


def line(custom_id="a", url="/v1/completions", **changes) -> dict:
    body = {"model": "tiny", "prompt": "hi"}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **changes}


def write(path, *lines) -> BatchFile:
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines), encoding="utf-8")
    return BatchFile.index(path)


def test_lines_are_found_again_where_they_lie(tmp_path):
    first, second = line("ä"), line("b", body={"model": "other"})
    batch = write(tmp_path / "in.jsonl", first, "", second)
    assert [(one.custom_id, one.model) for one in batch.lines] == [("ä", "tiny"), ("b", "other")]
    assert [batch.read(one) for one in batch.lines] == [first, second]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line(), "{"], "line 2: not JSON"),
        ([line(), "[]"], "line 2: a request is an object with a custom_id"),
        ([line(custom_id=7)], "line 1: a request is an object with a custom_id"),
        ([line(), line("b"), line()], "line 3: custom_id 'a' is that of line 1 too"),
        ([""], "no request"),
    ],
)
def test_what_cannot_be_told_apart_is_refused_by_line(tmp_path, lines, message):
    with pytest.raises(InputError, match=message):
        write(tmp_path / "in.jsonl", *lines)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"none\.jsonl: No such file"):
        BatchFile.index(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"method": "GET"}, "method"),
        ({"url": "/v1/embeddings"}, "url"),
        ({"url": ["/v1/completions"]}, "url"),
        ({"extra": 1}, "extra"),
        ({"body": {"model": "tiny"}}, "prompt"),
        ({"body": {"model": "tiny", "prompt": "x", "temprature": 1}}, "temprature"),
        ({"body": {"model": "tiny", "prompt": "x", "stream": True}}, "stream"),
        ({"body": {"model": "tiny", "prompt": "x", "max_tokens": "many"}}, "max_tokens"),
        ({"body": None}, None),
    ],
)
def test_a_wrong_request_is_answered_as_the_server_would(changes, param):
    with pytest.raises(ApiError) as caught:
        parse_request(line(**changes))
    assert caught.value.status == 400
    assert caught.value.body["error"]["param"] == param
    assert caught.value.body["error"]["type"] == "invalid_request_error"
