"""Plans by hand: what fits, which batch keeps an SLO, what it costs, and in which order."""

from dataclasses import replace

import pytest
from published_configs import LLAMA_8B

from llmq.profiles.devices import Device, find_device
from llmq.profiles.errors import InputError
from llmq.profiles.load.arrivals import Arrival
from llmq.profiles.plan import Lengths, Outlook, candidates, predict
from llmq.profiles.slo import Slo

BYTES = {"bf16": 16_060_522_496, "fp8": 9_080_000_000}
LENGTHS = Lengths.fixed(1000, 200)


def ways(*devices: Device, weights=BYTES, kv_dtypes=("bf16",), ranks=(1,), price=None):
    return candidates(
        LLAMA_8B,
        devices or (find_device("h100"),),
        weight_bytes=weights,
        kv_dtypes=kv_dtypes,
        ranks=dict.fromkeys(weights, ranks),
        memory_share=0.9,
        price_per_hour=price,
    )


def test_as_many_requests_as_the_memory_holds():
    plain, fp8 = ways()
    # 0.9 of 79.2 GiB beside the weights, 75 blocks of 16 tokens of 128 KiB for each of 1,200 tokens.
    assert plain.most_batch(LENGTHS) == int((0.9 * 79.2 * 2**30 - BYTES["bf16"]) // (75 * 16 * 131_072))
    assert fp8.most_batch(LENGTHS) > plain.most_batch(LENGTHS)
    two = ways(weights={"bf16": BYTES["bf16"]}, ranks=(2,))[0]
    assert two.most_batch(LENGTHS) == int((0.9 * 79.2 * 2**30 - BYTES["bf16"] / 2) // (75 * 16 * 65_536))


def test_the_batch_is_the_largest_whose_whole_interval_keeps_the_slo():
    slo = Slo.parse("ttft=1s,tpot=30ms@p99")
    way = ways()[0]
    found = predict(way, LENGTHS, slo)
    assert found.outlook is Outlook.PASS
    assert found.latencies_s["tpot"][2] <= 0.030
    high = way.model.coefficients.high
    over = way.model.tpot_s(found.batch + 1, 1000, 200) * high
    assert over > 0.030 or found.batch == way.most_batch(LENGTHS)
    assert found.output_tokens_per_s == pytest.approx(found.batch / way.model.tpot_s(found.batch, 1000, 200))


@pytest.mark.parametrize(("tpot", "outlook"), [("30ms", Outlook.PASS), ("8ms", Outlook.MAYBE), ("1ms", Outlook.FAIL)])
def test_an_outlook_by_where_the_interval_lies(tpot, outlook):
    assert predict(ways()[0], LENGTHS, Slo.parse(f"tpot={tpot}")).outlook is outlook


def test_what_does_not_fit_is_said():
    found = predict(ways(find_device("t4"))[0], LENGTHS, Slo.parse("tpot=1s"))
    assert (found.outlook, found.batch) == (Outlook.NO_ROOM, 0)


def test_dollars_are_those_of_all_devices_an_hour():
    two = predict(ways(ranks=(2,), price=3.0)[0], LENGTHS, Slo.parse("tpot=30ms"))
    dollars = two.dollars_per_million()
    assert dollars["output"] == pytest.approx(6.0 / 3600 / two.output_tokens_per_s * 1e6)
    assert two.input_tokens_per_s == pytest.approx(5 * two.output_tokens_per_s)
    assert dollars["total"] == pytest.approx(dollars["output"] / 6)


def test_the_surest_first_then_the_cheapest_and_unknown_prices_last():
    slo = Slo.parse("tpot=30ms")
    unpriced = replace(find_device("h100"), name="unpriced", price_per_hour=None)
    found = [predict(way, LENGTHS, slo) for way in ways(find_device("h100"), unpriced, find_device("t4"))]
    ordered = sorted(found, key=lambda one: one.order)
    assert [one.outlook for one in ordered] == sorted((one.outlook for one in found), key=list(Outlook).index)
    assert [one.candidate.device.name for one in ordered[:4]] == ["H100 SXM", "H100 SXM", "unpriced", "unpriced"]
    costs = [one.dollars_per_million()["total"] for one in ordered[:2]]
    assert costs == sorted(costs)
    assert ordered[2].dollars_per_million() is None


def test_lengths_of_a_trace():
    trace = [Arrival(0, 100 * number, 10) for number in range(1, 101)]
    slo = Slo.parse("ttft=1s@p90")
    found = Lengths.of_trace("a.csv", trace, slo, longest=20_000)
    assert (found.prompt, found.output, found.tail_prompt) == (5050, 10, 9100)
    short = Lengths.of_trace("a.csv", trace, slo, longest=1010)
    assert (short.prompt, len(short.requests)) == (550, 10)
    with pytest.raises(InputError, match="no request is at most 50 tokens long"):
        Lengths.of_trace("a.csv", trace, slo, longest=50)
    way = ways()[0]
    tail, fixed = (predict(way, one, slo) for one in (found, Lengths.fixed(5050, 10)))
    assert tail.latencies_s["ttft"][1] / tail.batch > fixed.latencies_s["ttft"][1] / max(fixed.batch, tail.batch) / 2
