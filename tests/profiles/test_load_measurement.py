"""Whole measurements in virtual time, on a server whose answers take exactly what they are told to."""

import asyncio
import json
import math
import random

import httpx
import pytest
from virtual_time import run_in_virtual_time

from llmq.profiles.errors import FailedError, InputError
from llmq.profiles.load import report
from llmq.profiles.load.arrivals import Arrival
from llmq.profiles.load.client import LoadClient
from llmq.profiles.load.measurement import Workload, cycled, measure
from llmq.profiles.load.metrics import RequestRecord
from llmq.profiles.load.pacing import ClosedLoop, OpenLoop, Replay
from llmq.profiles.load.prompts import WORDS, TokenIdPrompts, WordPrompts, prompt_maker
from llmq.profiles.load.saturation import Saturation
from llmq.profiles.load.server_metrics import PrefixCounters
from llmq.profiles.load.sweep import highest_rate
from llmq.profiles.load.target import CHAT, COMPLETIONS, Target, probe
from llmq.profiles.slo import Slo, Verdict

TTFT_S, GAP_S, TEMPLATE_TOKENS = 0.2, 0.05, 12


class Server(httpx.AsyncBaseTransport):
    """`slots` answers at once: the first token after TTFT_S, the others GAP_S apart. Words are tokens; a chat template
    adds TEMPLATE_TOKENS. `refuses`: fields that it answers with 400. Every fourth prompt token was in its cache."""

    def __init__(self, *, slots: int = 10_000, refuses: tuple[str, ...] = (), paths=(COMPLETIONS, CHAT), usage=True):
        self.bodies: list[dict] = []
        self.cached_tokens = self.prompt_tokens = 0
        self._slots = asyncio.Semaphore(slots)
        self._refuses, self._paths, self._usage = refuses, paths, usage

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            text = f"llmq_prefix_cache_hits_total {self.cached_tokens}\n"
            return httpx.Response(200, text=text + f"llmq_prefix_cache_queries_total {self.prompt_tokens}\n")
        body = json.loads(request.content)
        self.bodies.append(body)
        if request.url.path not in self._paths:
            return httpx.Response(404, json={"error": {"message": "no such route"}})
        fields = {**body, **body["stream_options"], **({"ids": 1} if isinstance(body.get("prompt"), list) else {})}
        if refused := [name for name in self._refuses if name in fields]:
            return httpx.Response(400, json={"error": {"message": f"{refused[0]} is not known"}})
        return httpx.Response(200, stream=_Stream(self._answer(body)))

    async def _answer(self, body: dict):
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        num_prompt = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        num_prompt += TEMPLATE_TOKENS * ("messages" in body)
        self.prompt_tokens += num_prompt
        self.cached_tokens += num_prompt // 4
        counts = body["stream_options"].get("continuous_usage_stats")
        async with self._slots:
            for number in range(body["max_tokens"]):
                await asyncio.sleep(GAP_S if number else TTFT_S)
                yield self._event({"text": "x", "delta": {"content": "x"}}, num_prompt, number + 1 if counts else None)
        yield self._event({"text": "", "finish_reason": "length"}, num_prompt, None)
        if self._usage:
            yield self._event(None, num_prompt, body["max_tokens"])
        yield b"data: [DONE]\n\n"

    def _event(self, choice, num_prompt: int, num_tokens: int | None) -> bytes:
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_prompt // 4},
        }
        content = {"choices": [] if choice is None else [choice], "usage": None if num_tokens is None else usage}
        return b"data: " + json.dumps(content).encode() + b"\n\n"


class _Stream(httpx.AsyncByteStream):
    def __init__(self, chunks) -> None:
        self._chunks = chunks

    async def __aiter__(self):
        async for chunk in self._chunks:
            yield chunk


def with_client(work, **server):
    """`work(client)` in virtual time: (its result, the server)."""

    async def run():
        made = Server(**server)
        async with LoadClient("http://stub", transport=made) as client:
            return await work(client), made

    return run_in_virtual_time(run())


TARGET = Target(COMPLETIONS, "m", TokenIdPrompts(1000), ignores_eos=True, counts_each_event=False, extra_body={})


def measured(workload: Workload, slo: str | None = None, **server):
    found, _ = with_client(
        lambda client: measure(client, TARGET, workload, salt="s", slo=slo and Slo.parse(slo)), **server
    )
    return found


def test_every_figure_of_a_replay_is_exact():
    # Every half second a prompt of 40 tokens and an answer of 11: 0.2 s to the first, 0.5 s for the others.
    lengths = [Arrival(number * 1.0, 40, 11) for number in range(12)]
    one = measured(Workload(lengths, Replay(speed=2.0), num_warmup=2), "ttft=200ms,tpot=50ms,e2e=700.001ms@p90")
    found = report.as_dict(one, price_per_hour=3.6)
    assert found["num_requests"] == found["num_answered"] == 10
    assert found["num_warmup"] == 2
    assert found["duration_s"] == pytest.approx(9 * 0.5 + 0.7)
    for name, value, count in (
        ("ttft", 0.2, 10),
        ("tpot", 0.05, 10),
        ("itl", 0.05, 100),
        ("e2e", 0.7, 10),
        ("normalized", 0.7 / 11, 10),
    ):
        latency = found["latency_s"][name]
        assert latency["count"] == count
        for point in ("mean", "p50", "p90", "p99", "highest"):
            assert latency[point] == pytest.approx(value, abs=1e-9)
    assert found["requests_per_s"] == pytest.approx(10 / 5.2)
    assert found["output_tokens_per_s"] == pytest.approx(110 / 5.2)
    assert found["prompt_tokens_per_s"] == pytest.approx(400 / 5.2)
    assert found["lengths"] == {
        "asked_prompt_tokens": 40,
        "prompt_tokens": 40,
        "asked_output_tokens": 11,
        "output_tokens": 11,
    }
    assert found["prefix_cache"] == {"hit_rate_by_usage": 0.25, "hit_rate_by_metrics": 0.25}
    # 0.001 $ a second over 110/5.2, 400/5.2 and 510/5.2 tokens a second.
    assert found["dollars_per_million_tokens"] == pytest.approx(
        {"output": 1000 * 5.2 / 110, "input": 1000 * 5.2 / 400, "total": 1000 * 5.2 / 510}
    )
    assert found["saturation"]["is_over"] is False
    json.dumps(found)


def test_goodput_counts_only_what_kept_the_slo():
    # One place: the n-th of three at once begins after the others.
    one = measured(Workload([Arrival(0, 10, 3)] * 3, OpenLoop(math.inf)), "ttft=600ms@p50", slots=1)
    assert [record.ttft_s for record in one.records] == pytest.approx([0.2, 0.5, 0.8])
    assert one.goodput.num_good == 2
    assert one.goodput.output_tokens_per_s == pytest.approx(6 / 0.9)
    assert one.goodput.input_tokens_per_s == pytest.approx(20 / 0.9)
    assert one.verdict is Verdict.PASS


def test_a_closed_loop_keeps_its_users_busy_and_is_never_called_saturated():
    one = measured(Workload([Arrival(0, 10, 5)] * 40, ClosedLoop(4), num_warmup=4))
    assert one.summary.requests_per_s == pytest.approx(4 / 0.4)
    assert one.saturation is None


@pytest.mark.parametrize(("rate", "is_over"), [(1.0, False), (4.0, True), (20.0, True)])
def test_over_saturation_is_seen(rate, is_over):
    # One place and 0.4 s an answer: 2.5 requests a second are its limit.
    one = measured(Workload([Arrival(0, 10, 5)] * 200, OpenLoop(rate), num_warmup=20), slots=1)
    assert one.is_saturated is is_over
    assert any("OVER-SATURATED" in note for note in report.notes(one)) is is_over
    if is_over:
        assert one.saturation.num_finished / one.saturation.window_s == pytest.approx(2.5, rel=0.1)


def queued(load: float, seed: int, *, slots: int = 8, requests: int = 100, warmup: int = 10) -> Saturation:
    """A simulated queue: Poisson arrivals at `load` times what `slots` places finish, service times 0.3 to 1.7."""
    draw, time_s, free_s, records = random.Random(seed), 0.0, [0.0] * slots, []
    for _ in range(requests + warmup):
        place = free_s.index(min(free_s))
        begin_s = max(time_s, free_s[place])
        free_s[place] = begin_s + draw.uniform(0.3, 1.7)
        records.append(RequestRecord(time_s, time_s, (begin_s + 0.1,), end_s=free_s[place], num_output_tokens=10))
        time_s += draw.expovariate(load * slots)
    return Saturation.of(records, warmup)


@pytest.mark.parametrize(("load", "least", "most"), [(0.7, 0, 2), (1.25, 60, 95), (1.5, 96, 100)])
def test_over_saturation_is_rarely_said_of_a_queue_that_holds(load, least, most):
    assert least <= sum(queued(load, seed).is_over for seed in range(100)) <= most


def test_a_queue_that_grows_while_nothing_is_answered_is_over_saturated():
    records = [RequestRecord(i, i, end_s=100.0, error="timed out") for i in range(20)]
    assert Saturation.of(records).is_over
    assert Saturation.of(records[:5]) is None


def test_answers_that_outlast_the_run_are_no_steady_state():
    one = measured(Workload([Arrival(0, 10, 50)] * 20, OpenLoop(100.0)))
    assert not one.is_saturated
    assert any("steady state" in note for note in report.notes(one))


def test_each_kind_of_error_is_counted_with_an_example():
    one = measured(Workload([Arrival(0, 10, 3)] * 4, OpenLoop(5.0)), "ttft=1s", refuses=("ignore_eos",))
    assert one.summary.errors == {"status 400": 4}
    assert one.error_examples == {"status 400": "ignore_eos is not known"}
    assert one.goodput.num_good == 0
    assert one.verdict is Verdict.FAIL
    assert report.as_dict(one, 1.0)["dollars_per_million_tokens"] == {"input": None, "output": None, "total": None}


def test_a_row_for_each_request():
    one = measured(Workload([Arrival(0, 40, 11)] * 3, OpenLoop(math.inf), num_warmup=1))
    rows = [dict(zip(report.CSV_COLUMNS, row, strict=True)) for row in report.csv_rows(one)]
    assert [row["warmup"] for row in rows] == [1, 0, 0]
    assert rows[2]["ttft_s"] == 0.2
    assert rows[2]["tpot_s"] == 0.05
    assert (rows[2]["asked_output_tokens"], rows[2]["output_tokens"], rows[2]["error"]) == (11, 11, "")


def probed(**server):
    return with_client(lambda client: probe(client, "m"), **server)


def test_a_server_that_takes_all_is_asked_with_all():
    target, server = probed()
    assert target.path == COMPLETIONS
    assert target.ignores_eos
    assert target.counts_each_event
    assert isinstance(target.prompts, TokenIdPrompts)
    assert target.num_probes == len(server.bodies)
    body = target.body([1, 2], 7)
    assert body["prompt"] == [1, 2]
    assert (body["max_tokens"], body["ignore_eos"]) == (7, True)


def test_a_server_that_takes_little_is_asked_with_that():
    target, _ = probed(refuses=("ignore_eos", "continuous_usage_stats", "ids"))
    assert not target.ignores_eos
    assert not target.counts_each_event
    assert target.prompts == WordPrompts(1.0, 0.0)
    assert target.body("a b", 7)["ignore_eos"] is None


def test_a_chat_only_server_s_template_is_measured():
    target, _ = probed(paths=(CHAT,))
    assert target.path == CHAT
    assert target.prompts == WordPrompts(1.0, TEMPLATE_TOKENS)
    prompt = prompt_maker(target.prompts, "s")(0, Arrival(0, 100, 1))
    assert len(prompt.split()) == 100 - TEMPLATE_TOKENS
    assert target.body(prompt, 3)["messages"] == [{"role": "user", "content": prompt}]


@pytest.mark.parametrize(
    ("server", "kind", "words"),
    [
        ({"usage": False}, InputError, "--tokenizer"),
        ({"paths": ()}, FailedError, "status 404: no such route"),
        ({"refuses": ("model",)}, FailedError, "model is not known"),
    ],
)
def test_a_server_that_cannot_be_measured_is_said_to_be(server, kind, words):
    with pytest.raises(kind, match=words):
        probed(**server)


def test_prompts_share_blocks_where_the_trace_does():
    make = prompt_maker(TokenIdPrompts(50_000), "run")
    one, other = make(0, Arrival(0, 1000, 1, (7, 8))), make(1, Arrival(0, 1100, 1, (7, 9, 10)))
    assert (len(one), len(other)) == (1000, 1100)
    assert one[:512] == other[:512]
    assert one[512] != other[512]
    assert prompt_maker(TokenIdPrompts(50_000), "another run")(0, Arrival(0, 1000, 1, (7, 8)))[:8] != one[:8]
    scaled_make = prompt_maker(TokenIdPrompts(50_000), "run", length_scale=1 / 32)
    assert scaled_make(0, Arrival(0, 32, 1, (7, 8)))[:16] == scaled_make(1, Arrival(0, 32, 1, (7, 9)))[:16]
    assert scaled_make(0, Arrival(0, 32, 1, (7, 8)))[16] != scaled_make(1, Arrival(0, 32, 1, (7, 9)))[16]


def test_word_prompts_have_the_length_that_was_measured():
    prompts = WordPrompts.calibrated((8, 22), (72, 118))  # 1.5 tokens a word, 10 added
    assert prompts == WordPrompts(1.5, 10.0)
    text = prompt_maker(prompts, "s")(0, Arrival(0, 310, 1))
    assert len(text.split()) == 200
    assert set(text.split()) <= set(WORDS)
    assert WordPrompts.calibrated((8, 30), (72, 30)) == WordPrompts()  # a server that counts nothing of it


def test_prefix_counters_are_summed_over_labels():
    text = '# HELP x\nvllm:prefix_cache_hits_total{engine="0"} 3\nvllm:prefix_cache_hits_total{engine="1"} 4.0\n'
    counters = PrefixCounters.parse(text + 'vllm:prefix_cache_queries_total{engine="0",m="a b"} 28 1700000000\n')
    assert counters == PrefixCounters(7, 28)
    assert counters.hit_rate == 0.25
    assert PrefixCounters(9, 38).since(counters) == PrefixCounters(2, 10)
    assert PrefixCounters(0, 0).hit_rate is None
    assert PrefixCounters.parse("nothing 1\n") is None
    assert PrefixCounters.parse(None) is None


def test_lengths_are_cycled():
    lengths = [Arrival(0, 1, 1), Arrival(0, 2, 2)]
    assert [one.num_prompt_tokens for one in cycled(lengths, 5)] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("limit", [0.013, 0.9, 1.0, 3.3, 17.0, 99.9])
@pytest.mark.parametrize("start", [0.05, 1.0, 60.0])
def test_the_highest_rate_is_found_within_the_tolerance(limit, start):
    tried = []

    async def bears(rate):
        tried.append(rate)
        return rate <= limit

    found = asyncio.run(highest_rate(bears, start=start, most=100.0, tolerance=0.05))
    assert limit / 1.05 - 1e-9 <= found <= limit
    assert len(tried) == len(set(tried)) < 25


def test_a_sweep_ends_at_its_ends():
    async def always(rate):
        return True

    async def never(rate):
        return False

    assert asyncio.run(highest_rate(always, start=1.0, most=10.0)) == 10.0
    assert asyncio.run(highest_rate(never, start=1.0, most=10.0)) is None


def test_a_sweep_over_the_stub_finds_its_limit():
    """One place and 0.4 s an answer: beyond 2.5 requests a second the queue grows for ever."""
    slo = Slo.parse("ttft=10s@p90")

    async def work(client):
        async def bears(rate):
            one = await measure(
                client, TARGET, Workload([Arrival(0, 10, 5)] * 330, OpenLoop(rate), 30), salt=str(rate), slo=slo
            )
            return one.verdict is Verdict.PASS and not one.is_saturated

        return await highest_rate(bears, start=1.0, most=100.0)

    found, _ = with_client(work, slots=1)
    assert 1.9 < found < 2.7
