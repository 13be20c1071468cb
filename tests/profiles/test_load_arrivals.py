import itertools
import json

import pytest

from llmq.profiles.errors import InputError
from llmq.profiles.load.arrivals import Arrival, poisson, read_trace, replay

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


@pytest.mark.parametrize(
    ("name", "text"), [("t.csv", "a,b\n1,2\n"), ("t.jsonl", '{"a": 1}\n'), ("t.jsonl", "no\n"), ("t.txt", "")]
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


def test_poisson_keeps_lengths_and_has_exponential_gaps():
    lengths = [Arrival(0.0, number, 1) for number in range(20_000)]
    arrivals = poisson(lengths, rate_per_s=5, seed=1)
    assert [one.num_prompt_tokens for one in arrivals] == list(range(20_000))
    gaps = [later.time_s - earlier.time_s for earlier, later in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert arrivals[0].time_s == 0
    assert mean == pytest.approx(0.2, rel=0.03)
    assert variance == pytest.approx(0.04, rel=0.06)  # mean², as only the exponential has
    assert poisson(lengths, rate_per_s=5, seed=1) == arrivals
    assert poisson(lengths, rate_per_s=5, seed=2) != arrivals


def test_the_real_traces_have_their_published_means(shared):
    azure = read_trace(shared / "data/traces/azure_llm_2023_conv.csv")
    assert len(azure) == 19_366
    assert azure[-1].time_s == pytest.approx(3502, abs=1)
    assert sum(one.num_prompt_tokens for one in azure) / len(azure) == pytest.approx(1155, abs=1)
    mooncake = read_trace(shared / "data/traces/mooncake_synthetic.jsonl")
    assert sum(len(one.hash_ids) for one in mooncake) == 121_877
