"""`llmq bench` over a socket: a stub whose timings are known, and our own server. Bounds are loose: a busy machine."""

import csv
import json
import re
import signal
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from llmq.cli.bench import app
from llmq.cli.bench_plan import BenchPlan
from llmq.cli.local_server import serving
from llmq.profiles.errors import FailedError, InputError
from llmq.profiles.load.pacing import ClosedLoop, OpenLoop, Replay

TTFT_S, GAP_S = 0.03, 0.005


class Stub(BaseHTTPRequestHandler):
    """The first token after TTFT_S, the others GAP_S apart; `mode` of the server says what it cannot do."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path != "/v1/models" or self.server.mode == "no list":
            self._send(404, {})
        elif self.server.mode == "key" and self.headers["authorization"] != "Bearer sesame":
            self._send(401, {"error": {"message": "who are you?"}})
        else:
            self._send(200, {"data": [{"id": "stub"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        mode = self.server.mode
        if mode == "whole":
            self._send(200, {"choices": [{"text": "x", "finish_reason": "stop"}]})
        elif mode == "full" and len(self.server.bodies) > 6:
            self._send(429, {"error": {"message": "come back later"}})
        else:
            self._stream(body["max_tokens"], len(body["prompt"]), with_usage=mode != "uncounted")

    def _stream(self, count: int, num_prompt: int, *, with_usage: bool) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for number in range(count):
            time.sleep(GAP_S if number else TTFT_S)
            self._event({"choices": [{"text": "x", "finish_reason": "length" if number == count - 1 else None}]})
        if with_usage:
            self._event({"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": count}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, content: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.wfile.flush()

    def _send(self, status: int, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def stub():
    """stub(mode) -> its URL."""
    servers = []

    def start(mode: str = "") -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
        server.mode, server.bodies = mode, []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    start.servers = servers
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def bench(*args: str, code: int = 0):
    done = CliRunner().invoke(app, [str(one) for one in args], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def test_all_figures_of_a_stub(stub, tmp_path):
    table, page = tmp_path / "rows.csv", tmp_path / "page.html"
    options = ("--rate", "50", "--requests", "20", "--prompt-tokens", "30", "--output-tokens", "5")
    done = bench(stub() + "/v1", *options, "--price-per-hour", "2", "--csv", table, "--html", page, "--json")
    found = json.loads(done.stdout)
    assert (found["num_requests"], found["num_answered"], found["num_warmup"]) == (20, 20, 2)
    latency = found["latency_s"]
    assert latency["ttft"]["count"] == 20
    assert latency["itl"]["count"] == 80
    assert latency["ttft"]["p50"] >= TTFT_S
    assert latency["tpot"]["p50"] >= GAP_S
    assert latency["e2e"]["p50"] >= TTFT_S + 4 * GAP_S
    assert found["lengths"]["prompt_tokens"] == 30
    assert found["lengths"]["output_tokens"] == 5
    assert found["dollars_per_million_tokens"]["output"] == pytest.approx(2 / 3600 / found["output_tokens_per_s"] * 1e6)
    assert found["mfu"] is None
    check_page(page.read_text(), num_plots=4)
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 22
    assert sum(row["warmup"] == "1" for row in rows) == 2


def test_a_table_for_people(stub):
    options = ("--concurrency", "2", "--requests", "8", "--output-tokens", "3")
    shown = bench(stub(), *options, "--slo", "ttft=10s@p50", "--price-per-hour", "2").stdout
    for words in ("closed loop, 2 at once", "TTFT", "E2E / tokens", "goodput: requests/s", "100.0%: PASS"):
        assert words in shown
    for words in ("$ a million input tokens, at goodput", "8 (1)", "3.0 (3.0)", "256.0 (256.0)", "MFU"):
        assert words in shown
    assert "p99 of 8 requests" in shown


def test_mfu_where_the_model_and_the_peak_are_known(stub, tmp_path, shared):
    config = (shared / "data/configs/verbatim/meta-llama--Meta-Llama-3.1-8B_config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    options = ("--rate", "inf", "--requests", "4", "--prompt-tokens", "30", "--output-tokens", "5")
    mfu = ("--gpu", "h100", "--facts", tmp_path)
    found = json.loads(bench(stub(), *options, *mfu, "--json").stdout)
    # 34 tokens are read and 5 heads computed of each: 2 FLOPs a weight, attention beside it is next to nothing.
    layers, head = 8_030_261_248 - 2 * 128_256 * 4096, 128_256 * 4096
    flops = 4 * 2 * (34 * layers + 5 * head)
    assert found["mfu"] == pytest.approx(flops / found["duration_s"] / 989e12, rel=0.01)
    shown = bench(stub(), *options, *mfu, "--tp", "2").stdout
    assert "MFU (2 × H100 SXM, 989 TFLOP/s)" in shown
    assert "MFU is left out" not in shown


@pytest.mark.parametrize(("slo", "code"), [("ttft=10s@p50", 0), ("ttft=1ms@p50", 1), ("ttft=10s@p99", 3)])
def test_the_exit_code_is_the_verdict(stub, slo, code):
    bench(stub(), "--rate", "inf", "--requests", "4", "--output-tokens", "2", "--slo", slo, code=code)


def test_a_sweep_s_exit_code_is_its_best_point_s_verdict(stub):
    url = stub()
    options = ("--rate", "40", "--max-rate", "40", "--requests", "5", "--output-tokens", "1", "--json")
    assert json.loads(bench(url, "--sweep", "--slo", "ttft=10s@p99", *options, code=3).stdout)["best_rate"] == 40
    done = bench(url, "--rate", "inf", "--requests", "5", "--output-tokens", "1", "--json")
    assert json.loads(done.stdout, parse_constant=pytest.fail)["requests_per_s_offered"] is None


def check_page(page: str, num_plots: int) -> None:
    """Well-formed, with its plots, and nothing in it that is loaded from elsewhere."""
    HTMLParser(convert_charrefs=True).feed(page)
    drawn = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawn) == num_plots
    for one in drawn:
        assert ElementTree.fromstring(one) is not None
        assert "nan" not in one
    assert not re.search(r"""(src|href)=|url\(|@import|http(?!://www\.w3\.org/2000/svg|://127)""", page)


def test_a_sweep_shows_every_rate(stub, tmp_path):
    options = ("--slo", "ttft=10s@p50", "--rate", "20", "--max-rate", "40", "--requests", "20", "--output-tokens", "2")
    found = json.loads(bench(stub(), "--sweep", *options, "--json").stdout)
    assert found["best_rate"] == 40
    assert [point["requests_per_s_offered"] for point in found["points"]] == [20, 40]
    shown = bench(stub(), "--sweep", *options, "--html", tmp_path / "page.html").stdout
    check_page((tmp_path / "page.html").read_text(), num_plots=6)
    assert "Highest rate that keeps ttft=10s@p50: 40 requests/s" in shown


def test_errors_are_shown_apart_with_what_the_server_said(stub):
    shown = bench(stub("full"), "--rate", "50", "--requests", "10", "--warmup", "0", "--output-tokens", "2").stdout
    assert "status 429: come back later" in shown
    assert "requests were not answered" in shown


@pytest.mark.parametrize(
    ("mode", "kind", "words"),
    [
        ("key", InputError, "who are you.*--api-key"),
        ("whole", InputError, "does not stream"),
        ("uncounted", InputError, "no token counts.*--tokenizer"),
    ],
)
def test_a_server_that_cannot_be_measured(stub, mode, kind, words):
    with pytest.raises(kind, match=words):
        bench(stub(mode), "--api-key", "wrong")


def test_a_server_without_a_list_of_models_is_told_which(stub):
    url = stub("no list")
    with pytest.raises(InputError, match="needs --model NAME"):
        bench(url)
    bench(url, "--model", "mine", "--rate", "inf", "--requests", "2", "--output-tokens", "1")
    assert {one["model"] for one in stub.servers[0].bodies} == {"mine"}


def test_no_server():
    with pytest.raises(InputError, match="nothing answers at"):
        bench("http://127.0.0.1:9")


def test_a_tokenizer_counts_where_the_server_does_not(stub, tiny_llama):
    options = ("--rate", "inf", "--requests", "3", "--output-tokens", "4", "--tokenizer", tiny_llama(), "--json")
    found = json.loads(bench(stub("uncounted"), *options).stdout)
    assert found["num_answered"] == 3
    assert found["lengths"]["output_tokens"] > 0
    assert found["lengths"]["prompt_tokens"] == 256


def test_nothing_answered_is_a_failure(stub):
    with pytest.raises(FailedError, match=r"not one of 5 requests was answered: 5 × status 429 \(come back later\)"):
        bench(stub("full"), "--rate", "inf", "--requests", "5", "--warmup", "3", "--output-tokens", "1")


def test_a_body_of_one_s_own_goes_into_each_request(stub):
    url = stub()
    bench(url, "--rate", "inf", "--requests", "2", "--output-tokens", "1", "--body", '{"temperature": 0}')
    assert all(one["temperature"] == 0 for one in stub.servers[0].bodies)
    with pytest.raises(InputError, match="no JSON"):
        bench(url, "--body", "{")
    with pytest.raises(InputError, match="must be a JSON object"):
        bench(url, "--body", "[]")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--concurrency", "2", "--rate", "1"], "--rate has no meaning with --concurrency"),
        (["--speed", "2"], "--speed is of a --trace"),
        (["--requests", "5", "--duration", "5"], "--requests says how many"),
        (["--rate", "0"], "--rate 0: requests a second"),
        (["--rate", "fast"], "--rate fast"),
        (["--sweep"], "give --slo"),
        (["--slo", "ttft=1"], "no limit"),
        (["--rate", "inf", "--duration", "5"], "all at once"),
        (["--endpoint", "embeddings"], "--endpoint embeddings: one of completions, chat"),
        (["--gpu", "h100"], "give --facts"),
        (["--facts", "x"], "name it"),
        (["--threads", "2"], "--threads is of a model served here"),
        (["--csv", "/no/such/folder/x.csv"], "cannot be written"),
        (["--trace", "none.csv"], "no such trace"),
        (["--burstiness", "0"], "burstiness 0: must be above 0"),
    ],
)
def test_wrong_usage_is_said_before_anything_is_asked(args, words):
    with pytest.raises(InputError, match=words):
        bench("http://127.0.0.1:9", *args)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{n},{n + 10},4\n" for n in range(30)))
    return path


def test_a_trace_is_replayed_or_lends_its_lengths(trace):
    replayed = BenchPlan(trace=trace, speed=2.0, duration=10.0).workload()
    assert replayed.pacing == Replay(2.0)
    assert len(replayed.lengths) == 20
    assert replayed.num_warmup == 2
    some = BenchPlan(trace=trace, requests=10, warmup=3).workload()
    assert [one.num_prompt_tokens for one in some.lengths] == list(range(10, 23))
    lent = BenchPlan(trace=trace, rate="5", length_scale=0.5, requests=40, warmup=0).workload()
    assert lent.pacing == OpenLoop(5.0)
    assert [one.num_prompt_tokens for one in lent.lengths[:30:10]] == [5, 10, 15]
    assert lent.lengths[30] == lent.lengths[0]
    assert BenchPlan(trace=trace, concurrency=3).workload().pacing == ClosedLoop(3)
    with pytest.raises(InputError, match="are the warm-up"):
        BenchPlan(trace=trace, warmup=50).workload()
    with pytest.raises(InputError, match="own times"):
        BenchPlan(trace=trace, burstiness=2.0)


def test_a_duration_makes_requests_at_the_rate():
    assert len(BenchPlan(rate="4", duration=20.0, warmup=5).workload().lengths) == 85
    swept = BenchPlan(rate="4", slo_text="ttft=1s", sweep=True, warmup=0)
    assert len(swept.workload(10.0).lengths) == 300
    assert len(swept.workload(0.1).lengths) == 40


def test_our_own_server_with_a_key_takes_ids_and_ignores_eos(tiny_llama):
    folder = tiny_llama(max_position_embeddings=4096)
    with serving(folder, "--threads", "1", "--api-key", "sesame") as url:
        options = ("--rate", "20", "--requests", "6", "--prompt-tokens", "40", "--output-tokens", "12", "--json")
        found = json.loads(bench(url, *options, "--api-key", "sesame", "--endpoint", "completions").stdout)
        chat = json.loads(bench(url, *options, "--api-key", "sesame", "--endpoint", "chat").stdout)
    for one in (found, chat):
        assert one["num_answered"] == 6
        assert one["lengths"]["output_tokens"] == 12
        assert one["num_ended_early"] == 0
        assert one["prefix_cache"]["hit_rate_by_metrics"] is not None
        assert not any("spread evenly" in note for note in one["notes"])  # our server counts in every chunk
    assert chat["lengths"]["prompt_tokens"] == pytest.approx(40, rel=0.5)


def test_a_model_is_served_for_the_time_being(tiny_llama):
    options = ("--requests", "4", "--rate", "20", "--prompt-tokens", "20", "--output-tokens", "3", "--json")
    found = json.loads(bench(tiny_llama(), "--threads", "1", "--serve-options", "--kv-dtype int8", *options).stdout)
    assert found["num_answered"] == 4
    assert found["lengths"]["prompt_tokens"] == 20
    assert found["prompts"].startswith("random token ids")


def interrupted(url: str, *args: str, after: int, server) -> tuple[int, str, str]:
    """llmq bench as a program that gets Ctrl-C when the stub has been asked `after` times: (exit code, out, err)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "llmq", "bench", url, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while len(server.bodies) < after and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_ctrl_c_shows_what_was_measured_until_then(stub):
    url = stub()
    options = ("--rate", "20", "--requests", "1000", "--warmup", "2", "--output-tokens", "3", "--json")
    code, out, err = interrupted(url, *options, after=20, server=stub.servers[0])
    assert code == 130, err
    assert "Traceback" not in err
    found = json.loads(out)
    assert 5 < found["num_answered"] < 100
    assert found["num_answered"] + found["num_warmup"] + found["num_cut"] == 1002
    assert found["latency_s"]["ttft"]["count"] == found["num_answered"]
    assert any(note.startswith("Interrupted: ") for note in found["notes"])


def test_ctrl_c_in_a_sweep_keeps_its_rates(stub):
    url = stub()
    options = ("--sweep", "--slo", "ttft=5s,tpot=1s@p50", "--rate", "10", "--requests", "20", "--warmup", "0")
    code, out, err = interrupted(url, *options, "--output-tokens", "2", "--json", after=45, server=stub.servers[0])
    assert code == 130, err
    found = json.loads(out)
    assert found["best_rate"] is not None
    assert len(found["points"]) >= 1
