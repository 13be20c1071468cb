import pytest

from llmq.profiles.cost import dollars_per_million
from llmq.profiles.errors import InputError
from llmq.profiles.load.metrics import RequestRecord
from llmq.profiles.slo import Slo, Verdict


def request(ttft_s: float, tpot_s: float = 0.05, tokens: int = 11, error: str | None = None) -> RequestRecord:
    end_s = ttft_s + tpot_s * (tokens - 1)
    return RequestRecord(0.0, 0.0, (ttft_s,), end_s=end_s, num_output_tokens=tokens, error=error)


@pytest.mark.parametrize(
    ("text", "limits", "percentile"),
    [
        ("ttft=500ms,tpot=50ms@p99", {"ttft": 0.5, "tpot": 0.05}, 99),
        ("e2e=2.5s", {"e2e": 2.5}, 99),
        ("ttft=.5s, e2e=2s@p99.9", {"ttft": 0.5, "e2e": 2.0}, 99.9),
    ],
)
def test_limits_are_read(text, limits, percentile):
    slo = Slo.parse(text)
    assert slo.limits_s == pytest.approx(limits)
    assert slo.percentile == percentile
    assert Slo.parse(str(slo)) == slo


@pytest.mark.parametrize(
    "text",
    [
        *("", "ttft", "ttft=500", "ttft=0ms", "ttft=-1s", "itl=5ms", "ttft=1s,ttft=2s"),
        *("ttft=1s@99", "ttft=1s@p0", "ttft=1s@p100", "ttft=1s@p99,tpot=5ms@p50"),
    ],
)
def test_what_is_no_slo_is_refused_with_the_syntax(text):
    with pytest.raises(InputError, match="write ttft=500ms"):
        Slo.parse(text)


def test_a_request_must_keep_all_limits_at_once():
    slo = Slo.parse("ttft=500ms,tpot=50ms,e2e=2s@p90")
    assert slo.is_met_by(request(0.5, 0.05))
    assert not slo.is_met_by(request(0.501, 0.05))
    assert not slo.is_met_by(request(0.5, 0.0501))
    assert not slo.is_met_by(request(0.5, 0.05, tokens=40))
    assert not slo.is_met_by(request(0.1, error="status 429"))
    assert slo.is_met_by(request(0.5, tokens=1))


@pytest.mark.parametrize(
    ("good", "bad", "verdict"),
    [
        (99, 1, Verdict.PASS),
        (98, 2, Verdict.FAIL),
        (100, 0, Verdict.PASS),
        (99, 0, Verdict.NOT_ENOUGH),
        (98, 1, Verdict.FAIL),
        (0, 0, Verdict.NOT_ENOUGH),
    ],
)
def test_the_verdict_is_the_share_that_kept_all(good, bad, verdict):
    assert Slo.parse("ttft=1s@p99").verdict([request(0.5)] * good + [request(2.0)] * bad) is verdict


def test_dollars_per_million():
    # 3.60 $ an hour are 0.001 $ a second: at 100 tokens/s a token costs 1e-5 $.
    assert dollars_per_million(3.6, 100) == pytest.approx(10)
    assert dollars_per_million(3.6, 0) is None
