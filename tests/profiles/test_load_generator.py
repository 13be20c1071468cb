"""The generator against a stub whose timings are known: virtual time makes each formula exact."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from virtual_time import run_in_virtual_time

from llmq.profiles.load.arrivals import Arrival
from llmq.profiles.load.client import LoadClient
from llmq.profiles.load.generator import closed_loop, open_loop, random_prompt_ids
from llmq.profiles.load.metrics import Distribution, RequestRecord, summarize

TTFT_S, GAP_S = 0.5, 0.125


def event(text=None, finish_reason=None, usage=None) -> bytes:
    choices = [] if text is None and finish_reason is None else [{"text": text or "", "finish_reason": finish_reason}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


def usage(num_output_tokens: int) -> dict:
    return {
        "prompt_tokens": 3,
        "completion_tokens": num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


class Stub(httpx.AsyncBaseTransport):
    """A server of `slots` places: the first token after TTFT_S, the others GAP_S apart, whatever else it is told."""

    def __init__(self, slots: int = 1000) -> None:
        self.bodies: list[dict] = []
        self._slots = asyncio.Semaphore(slots)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        if body.get("mode") == "busy":
            return httpx.Response(429, json={"error": {"message": "full"}})
        if body.get("mode") == "whole":
            return httpx.Response(200, json={"choices": [{"text": "x", "finish_reason": "stop"}], "usage": usage(1)})
        if body.get("mode") == "refused":
            raise httpx.ConnectError("no")
        if body.get("mode") == "slow":
            raise httpx.ReadTimeout("late")
        return httpx.Response(200, stream=_Events(self._answer(body)))

    async def _answer(self, body: dict):
        async with self._slots:
            mode, count = body.get("mode"), body["max_tokens"]
            await asyncio.sleep(TTFT_S)
            for number in range(count):
                if number:
                    await asyncio.sleep(GAP_S)
                so_far = usage((number + 1) * 2 - 1) if mode == "counting" else None
                yield event("x" if mode != "textless" else "", usage=so_far)
                if mode == "broken":
                    yield b'data: {"error": {"message": "the engine is dead"}}\n\n'
                if mode == "garbage":
                    yield b"data: {\n\n"
            if mode == "cut":
                return
            yield event(finish_reason="length")
            if mode != "uncounted":
                tokens = count * 2 - 1 if mode == "counting" else count * body.get("tokens_per_event", 1)
                yield event(usage=usage(tokens))
            yield b"data: [DONE]\n\n"


class _Events(httpx.AsyncByteStream):
    def __init__(self, chunks) -> None:
        self._chunks = chunks

    async def __aiter__(self):
        async for chunk in self._chunks:
            yield chunk

    async def aclose(self) -> None:
        await self._chunks.aclose()


def run(work, slots: int = 1000):
    """`work(client)` in virtual time: (its result, the stub)."""

    async def with_client():
        stub = Stub(slots)
        async with LoadClient("http://stub", transport=stub) as client:
            return await work(client), stub

    return run_in_virtual_time(with_client())


def one(**body) -> RequestRecord:
    return run(lambda client: client.request("/v1/completions", {"max_tokens": 5, **body}))[0]


def test_one_request_is_timed_by_the_formulas():
    record = one()
    assert record.error is None
    assert record.ttft_s == pytest.approx(TTFT_S)
    assert record.itl_s == pytest.approx([GAP_S] * 4)
    assert record.e2e_s == pytest.approx(TTFT_S + 4 * GAP_S)
    assert record.tpot_s == pytest.approx(GAP_S)
    assert (record.num_prompt_tokens, record.num_cached_tokens, record.num_output_tokens) == (3, 2, 5)
    assert record.finish_reason == "length"


def test_tokens_are_counted_by_usage_not_by_events():
    record = one(tokens_per_event=3)
    assert record.num_output_tokens == 15
    assert record.tpot_s == pytest.approx(4 * GAP_S / 14)
    assert record.itl_s == pytest.approx([GAP_S / 3] * 12)  # three tokens in each of the four events after the first
    assert record.normalized_s == pytest.approx((TTFT_S + 4 * GAP_S) / 15)


def test_counts_in_every_event_place_the_tokens():
    record = one(mode="counting")  # one token, then two in each event
    assert record.event_tokens == (1, 2, 2, 2, 2)
    assert record.itl_s == pytest.approx([GAP_S / 2] * 8)
    assert sum(record.itl_s) == pytest.approx(record.e2e_s - record.ttft_s)


def test_events_without_a_whole_token_are_waited_through():
    record = RequestRecord(0.0, 0.0, (1.0, 2.0, 4.0, 5.0), event_tokens=(1, 0, 2, 1), end_s=5.0, num_output_tokens=4)
    assert record.itl_s == [1.5, 1.5, 1.0]


def test_more_events_than_tokens_and_fewer():
    assert RequestRecord(0, 0, (1, 2, 3, 4), num_output_tokens=2).tokens_by_event == (0, 1, 0, 1)
    assert RequestRecord(0, 0, (1, 2, 3, 4), num_output_tokens=5).tokens_by_event == (1, 1, 1, 2)
    assert RequestRecord(0, 0, ()).tokens_by_event == ()


def test_without_usage_a_tokenizer_counts():
    async def ask():
        async with LoadClient("http://stub", transport=Stub(), count_tokens=lambda text: len(text) * 2) as client:
            return await client.request(
                "/v1/completions", {"max_tokens": 5, "mode": "uncounted", "prompt": "abc", "ignore_eos": None}
            )

    record = run_in_virtual_time(ask())
    assert (record.error, record.num_prompt_tokens, record.num_output_tokens) == (None, 6, 10)


def test_what_a_server_says_of_an_error_is_kept():
    assert one(mode="busy").error_detail == "full"
    assert one(mode="broken").error_detail == "the engine is dead"


def test_a_field_that_is_none_is_not_sent():
    _, stub = run(lambda client: client.request("/v1/completions", {"max_tokens": 1, "ignore_eos": None}))
    assert "ignore_eos" not in stub.bodies[0]


def test_a_single_token_has_no_tpot():
    record = one(max_tokens=1)
    assert record.tpot_s is None
    assert record.e2e_s == record.ttft_s == pytest.approx(TTFT_S)


def test_tokens_without_text_are_an_answer_too():
    record = one(mode="textless")
    assert record.error is None
    assert record.ttft_s == record.e2e_s == pytest.approx(TTFT_S + 4 * GAP_S)


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("busy", "status 429"),
        ("refused", "ConnectError"),
        ("slow", "timed out"),
        ("broken", "error event"),
        ("garbage", "not JSON"),
        ("cut", "no [DONE]"),
        ("uncounted", "no usage"),
        ("whole", "not a stream"),
    ],
)
def test_what_is_no_whole_answer_is_an_error_by_name(mode, error):
    assert one(mode=mode).error == error


def test_a_client_may_leave():
    record, _ = run(
        lambda client: client.request("/v1/completions", {"max_tokens": 5}, leave_after_events=2),
    )
    assert record.error == "left"
    assert len(record.token_times_s) == 2


def test_open_loop_counts_from_when_a_request_was_due_and_waits_for_nobody():
    arrivals = [Arrival(0.0, 1, 5), Arrival(0.25, 1, 5), Arrival(0.25, 1, 5)]
    records, _ = run(lambda client: open_loop(client, arrivals, lambda _, one: {"max_tokens": 5}), slots=1)
    # One at a time: each waits for those before it, and that is in its latency.
    assert [record.ttft_s for record in records] == pytest.approx([0.5, 1.25, 2.25])
    assert [record.scheduled_s for record in records] == [0.0, 0.25, 0.25]
    assert [record.sent_s for record in records] == [0.0, 0.25, 0.25]


def test_latency_counts_from_the_due_time_even_if_sent_late():
    async def late(client):
        await asyncio.sleep(2)
        return await client.request("/v1/completions", {"max_tokens": 2}, scheduled_s=1.5)

    record, _ = run(late)
    assert record.ttft_s == pytest.approx(0.5 + TTFT_S)
    assert summarize([record]).send_lag.highest == pytest.approx(0.5)


def test_closed_loop_keeps_so_many_under_way():
    arrivals = [Arrival(99.0, 1, 5)] * 6
    records, _ = run(lambda client: closed_loop(client, arrivals, lambda *_: {"max_tokens": 5}, concurrency=2))
    assert [record.sent_s for record in records] == pytest.approx([0, 0, 1, 1, 2, 2])
    assert all(record.ttft_s == pytest.approx(TTFT_S) for record in records)


@pytest.mark.parametrize("at_once", [None, 2])
def test_cancelled_a_loop_keeps_what_was_answered(at_once):
    """A request takes 1 s; after 2.2 s two of those at 0, 1 and 2 s are answered, or four of two users."""
    arrivals = [Arrival(float(number), 1, 5) for number in range(6)]

    async def cut(client):
        def make_body(*_) -> dict:
            return {"max_tokens": 5}

        work = (
            open_loop(client, arrivals, make_body)
            if at_once is None
            else closed_loop(client, arrivals, make_body, concurrency=at_once)
        )
        task = asyncio.create_task(work)
        await asyncio.sleep(2.2)
        task.cancel()
        return await task, len(asyncio.all_tasks())

    (records, num_tasks), _ = run(cut)
    answered = 2 if at_once is None else 4
    assert [record is not None for record in records] == [True] * answered + [False] * (6 - answered)
    assert all(record.error is None for record in records[:answered])
    assert num_tasks == 1


def test_a_summary_keeps_errors_apart():
    modes = [None, None, "busy", "cut", None, "busy"]
    arrivals = [Arrival(0.5 * number, 1, 5) for number in range(6)]
    records, stub = run(
        lambda client: open_loop(client, arrivals, lambda number, one: {"max_tokens": 5, "mode": modes[number]})
    )
    summary = summarize(records)
    assert summary.errors == {"status 429": 2, "no [DONE]": 1}
    assert (summary.num_requests, summary.num_answered) == (6, 3)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (9, 6, 15)
    assert summary.duration_s == pytest.approx(3.0)  # the fifth is due at 2 and answered in 1
    assert summary.output_tokens_per_s == pytest.approx(5.0)
    assert summary.requests_per_s == pytest.approx(1.0)
    assert summary.e2e.count == 3
    assert summary.itl.count == 12
    assert summary.tpot.percentiles[99] == pytest.approx(GAP_S)
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in stub.bodies)


def test_percentiles_are_linear_between_neighbours():
    found = Distribution.of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (found.mean, found.highest, found.count) == (3.0, 5.0, 5)
    assert found.percentiles == pytest.approx({50: 3.0, 90: 4.6, 99: 4.96})
    assert Distribution.of([]) is None


def test_prompts_differ_by_number_and_repeat():
    assert random_prompt_ids(3, 40, 512, first_id=10) == random_prompt_ids(3, 40, 512, first_id=10)
    assert random_prompt_ids(3, 16, 512)[:8] != random_prompt_ids(4, 16, 512)[:8]
    assert min(random_prompt_ids(3, 4000, 512, first_id=10)) == 10


def test_over_a_socket_events_are_timed_as_they_come():
    """Not in virtual time: that nothing on the way collects the events. Lower bounds only, a machine may be slow."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(event("a"))
            self.wfile.flush()
            time.sleep(0.3)
            self.wfile.write(event("b", "stop") + event(usage=usage(2)) + b"data: [DONE]\n\n")

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    async def ask():
        async with LoadClient(f"http://127.0.0.1:{server.server_port}") as client:
            return await client.request("/v1/completions", {})

    try:
        record = asyncio.run(ask())
    finally:
        server.shutdown()
        server.server_close()
    assert record.error is None
    assert record.itl_s[0] >= 0.25
    assert record.tpot_s == pytest.approx(record.itl_s[0])
