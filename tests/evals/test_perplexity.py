import math

import pytest

from llmq.evals.perplexity import TextCounts, evaluate_perplexity
from llmq.evals.windows import plan_windows
from llmq.profiles.errors import InputError

TOKENS = [(7 * i * i + 3 * i) % 50 for i in range(101)]
COUNTS = TextCounts(num_tokens=101, num_words=60, num_bytes=400)


def bigram_nll(engine, positions) -> float:
    return -sum(float(engine.log_probs[TOKENS[i - 1], TOKENS[i]]) for i in positions)


def test_measures_of_overlapping_windows_equal_the_known_distribution(toy_engine):
    engine = toy_engine()
    result = evaluate_perplexity(engine, TOKENS, plan_windows(101, 32, 16), COUNTS)
    mean_nll = bigram_nll(engine, range(1, 101)) / 100
    assert result.num_scored == 100
    assert result.token_ppl == pytest.approx(math.exp(mean_nll), rel=1e-6)
    assert result.word_ppl == pytest.approx(math.exp(mean_nll * 101 / 60), rel=1e-6)
    assert result.bits_per_byte == pytest.approx(mean_nll / math.log(2) * 101 / 400, rel=1e-6)
    assert result.token_ppl_full_windows is None


def test_windows_side_by_side_give_the_papers_number_too(toy_engine):
    engine = toy_engine()
    result = evaluate_perplexity(engine, TOKENS, plan_windows(101, 20), COUNTS)
    scored = [i for i in range(100) if i % 20]
    assert result.num_scored == 95
    assert result.num_unscored == 6
    assert result.token_ppl == pytest.approx(math.exp(bigram_nll(engine, scored) / 95), rel=1e-6)
    assert result.token_ppl_full_windows == result.token_ppl

    longer_tail = evaluate_perplexity(engine, TOKENS, plan_windows(101, 30), COUNTS)
    full = [i for i in range(90) if i % 30]
    assert longer_tail.token_ppl_full_windows == pytest.approx(math.exp(bigram_nll(engine, full) / 87), rel=1e-6)
    assert longer_tail.token_ppl != longer_tail.token_ppl_full_windows


def test_progress_counts_up_to_all_scored_tokens(toy_engine):
    seen = []

    def progress(stage, done, total, *, unit=""):
        seen.append((done, total))

    evaluate_perplexity(toy_engine(), TOKENS, plan_windows(101, 20), COUNTS, progress)
    assert seen[-1] == (95, 95)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_window_longer_than_the_engine_holds_is_refused_with_what_fits(toy_engine):
    with pytest.raises(InputError, match="--window 64 or less"):
        evaluate_perplexity(toy_engine(max_model_len=64), TOKENS, plan_windows(101, 80), COUNTS)
