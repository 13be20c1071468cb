import itertools
import json
import math

import pytest

from llmq.profiles.errors import InputError
from llmq.profiles.load.arrivals import Arrival, random_arrivals, read_trace, replay, scaled

OWN = "arrival_s,prompt_tokens,output_tokens\n"
OWN_BAD = [("t.csv", OWN), ("t.csv", OWN + "1,-5,3\n"), ("t.csv", OWN + "nan,5,3\n"), ("t.csv", OWN + "1,5\n")]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:50.5000000,396,109\n2023-11-16 18:15:46.2500000,374,44\n"
)


def test_an_azure_trace_starts_at_zero_in_order(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    assert read_trace(path) == [Arrival(0.0, 374, 44), Arrival(4.25, 396, 109)]


def test_a_mooncake_trace_brings_its_hashes(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]},
        {"timestamp": 4500, "input_length": 512, "output_length": 6, "hash_ids": [0]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_trace(path) == [Arrival(0.0, 600, 5, (0, 7)), Arrival(1.5, 512, 6, (0,))]


def test_an_own_trace_is_told_by_its_columns(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("user,output_tokens,arrival_s,prompt_tokens\nx,7,12.5,100\ny,8,10,50\n")
    assert read_trace(path) == [Arrival(0.0, 50, 8), Arrival(2.5, 100, 7)]


@pytest.mark.parametrize(
    ("name", "text"), [("t.csv", "a,b\n1,2\n"), ("t.jsonl", '{"a": 1}\n'), ("t.jsonl", "no\n"), ("t.txt", ""), *OWN_BAD]
)
def test_what_is_no_trace_is_refused(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=name):
        read_trace(path)


def test_a_missing_trace_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such trace"):
        read_trace(tmp_path / "none.csv")


def test_replay_is_faster_and_cut():
    trace = [Arrival(0.0, 1, 1), Arrival(4.0, 2, 2), Arrival(8.0, 3, 3)]
    assert replay(trace, speed=2, duration_s=4) == [Arrival(0.0, 1, 1), Arrival(2.0, 2, 2)]
    with pytest.raises(InputError, match="above 0"):
        replay(trace, speed=0)


@pytest.mark.parametrize("burstiness", [1.0, 0.25, 4.0])
def test_random_arrivals_keep_lengths_and_have_gamma_gaps(burstiness):
    lengths = [Arrival(0.0, number, 1) for number in range(20_000)]
    arrivals = random_arrivals(lengths, rate_per_s=5, burstiness=burstiness, seed=1)
    assert [one.num_prompt_tokens for one in arrivals] == list(range(20_000))
    gaps = [later.time_s - earlier.time_s for earlier, later in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert arrivals[0].time_s == 0
    assert mean == pytest.approx(0.2, rel=0.05)
    assert variance == pytest.approx(0.04 / burstiness, rel=0.15)  # mean² / shape: Poisson's at 1
    assert random_arrivals(lengths, rate_per_s=5, burstiness=burstiness, seed=1) == arrivals
    assert random_arrivals(lengths, rate_per_s=5, burstiness=burstiness, seed=2) != arrivals


def test_an_infinite_rate_is_all_at_once():
    assert [one.time_s for one in random_arrivals([Arrival(1.0, 1, 1)] * 3, rate_per_s=math.inf)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "value"), [("rate_per_s", 0), ("rate_per_s", math.nan), ("burstiness", 0), ("burstiness", math.inf)]
)
def test_what_is_no_rate_is_refused(name, value):
    with pytest.raises(InputError, match="above 0"):
        random_arrivals([Arrival(0.0, 1, 1)], **{"rate_per_s": 1.0, name: value})


def test_scaled_lengths_are_at_least_a_token():
    assert scaled([Arrival(1.0, 100, 3, (1,))], 0.1) == [Arrival(1.0, 10, 1, (1,))]
    with pytest.raises(InputError, match="above 0"):
        scaled([], 0)


def test_the_real_traces_have_their_published_means(shared):
    azure = read_trace(shared / "data/traces/azure_llm_2023_conv.csv")
    assert len(azure) == 19_366
    assert azure[-1].time_s == pytest.approx(3502, abs=1)
    assert sum(one.num_prompt_tokens for one in azure) / len(azure) == pytest.approx(1155, abs=1)
    mooncake = read_trace(shared / "data/traces/mooncake_synthetic.jsonl")
    assert sum(len(one.hash_ids) for one in mooncake) == 121_877
