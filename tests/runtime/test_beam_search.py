"""Beams on shared blocks against a naive search that runs a whole forward for every beam at every step."""

import pytest
from engine_driver import Reference, force_preemption, greedy

from llmq.runtime.request import BeamParams, EngineRequest
from llmq.runtime.sampling_params import SamplingParams

PROMPT = [(13 * position) % 500 + 3 for position in range(37)]


def naive(reference, prompt, width, max_tokens, end_ids, length_penalty):
    live, finished = [([], 0.0)], []
    for _ in range(max_tokens):
        going = []
        for tokens, total in live:
            best = reference.log_probs([*prompt, *tokens])[-1].topk(2 * width)
            for token, logprob in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                if token in end_ids:
                    finished.append(
                        ((total + logprob) / max(1, len(tokens)) ** length_penalty, [*tokens, token], total + logprob)
                    )
                else:
                    going.append(([*tokens, token], total + logprob))
        live = sorted(going, key=lambda beam: beam[1], reverse=True)[:width]
    finished += [(total / len(tokens) ** length_penalty, tokens, total) for tokens, total in live]
    return sorted(finished, key=lambda entry: entry[0], reverse=True)


def search(engine, width, count, length_penalty=1.0, name="r", **params):
    engine.add_request(
        EngineRequest(
            request_id=name,
            prompt_token_ids=PROMPT,
            sampling_params=SamplingParams(**params),
            forks=[(f"{name}{index}", None) for index in range(1, count)],
            beams=BeamParams(width=width, length_penalty=length_penalty),
        )
    )


def finish(engine):
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    return outputs


@pytest.mark.parametrize(
    "changes", [{}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 8, "max_num_seqs": 8}], ids=repr
)
@pytest.mark.parametrize(("width", "length_penalty", "ends"), [(1, 1.0, False), (4, 1.0, False), (4, 0.5, True)])
def test_hypotheses_equal_the_naive_search(tiny_llama, make_engine, changes, width, length_penalty, ends):
    folder = tiny_llama()
    end_ids = set(range(3, 120)) if ends else set()
    expected = naive(Reference(folder), PROMPT, width, 12, end_ids, length_penalty)[:width]
    engine = make_engine(folder, **changes)
    search(engine, width, width, length_penalty, max_tokens=12, ignore_eos=True, stop_token_ids=frozenset(end_ids))
    outputs = finish(engine)
    assert [output.request_id for output in outputs] == ["r", *(f"r{index}" for index in range(1, width))]
    for output, (_, tokens, logprob) in zip(outputs, expected, strict=True):
        assert output.new_token_ids == tokens
        assert output.cumulative_logprob == pytest.approx(logprob, abs=1e-3)
        assert output.finish_reason == ("stop" if tokens[-1] in end_ids else "length")


def test_beams_share_what_they_have_in_common(tiny_llama, make_engine):
    engine = make_engine(tiny_llama(), enable_prefix_caching=False)
    search(engine, 8, 1, max_tokens=30, ignore_eos=True)
    most = 0
    while engine.has_unfinished_requests:
        engine.step()
        stats = engine.stats()
        most = max(most, stats.num_blocks - stats.num_free_blocks)
    # 67 tokens are 5 blocks; eight beams alone would hold 40. The two whole prompt blocks are held once.
    assert most <= 2 + 8 * 3


def test_a_search_survives_preemption_and_company(tiny_llama, make_engine):
    folder = tiny_llama()
    roomy = make_engine(folder)
    search(roomy, 4, 4, max_tokens=40, ignore_eos=True)
    expected = [output.new_token_ids for output in finish(roomy)]
    block_bytes = roomy.info.kv_cache_bytes // roomy.info.num_blocks
    tight = make_engine(folder, kv_cache_memory_bytes=14 * block_bytes, max_model_len=112)
    force_preemption(tight)
    search(tight, 4, 4, max_tokens=40, ignore_eos=True)
    for index in range(3):
        tight.add_request(
            EngineRequest(request_id=f"other{index}", prompt_token_ids=[index + 5] * 30, sampling_params=greedy(50))
        )
    made = [output.new_token_ids for output in finish(tight) if output.cumulative_logprob is not None]
    assert made == expected
    assert tight.stats().num_preemptions > 0


def test_abort_ends_every_beam(tiny_llama, make_engine):
    engine = make_engine(tiny_llama())
    search(engine, 4, 2, max_tokens=40, ignore_eos=True)
    for _ in range(5):
        engine.step()
    assert [output.request_id for output in engine.abort(["r", "r1"])] == ["r"]
    assert not engine.has_unfinished_requests
    assert finish(engine) == []
    search(engine, 2, 1, max_tokens=3, ignore_eos=True)  # the name is free again
    assert len(finish(engine)) == 1


@pytest.mark.parametrize(
    ("width", "count", "params", "message"),
    [
        (2, 3, {}, "3 hypotheses are asked of 2 beams"),
        (2, 2, {"presence_penalty": 1.0, "min_tokens": 2}, "presence_penalty, min_tokens"),
    ],
)
def test_what_a_search_cannot_honour_is_refused(tiny_llama, make_engine, width, count, params, message):
    engine = make_engine(tiny_llama())
    with pytest.raises(ValueError, match=message):
        search(engine, width, count, max_tokens=3, **params)


def test_the_names_of_all_hypotheses_are_taken(tiny_llama, make_engine):
    engine = make_engine(tiny_llama())
    search(engine, 3, 3, max_tokens=4)
    engine.step()
    for name in ("r", "r1", "r2"):
        with pytest.raises(ValueError, match="in use"):
            engine.add_request(
                EngineRequest(request_id=name, prompt_token_ids=[5], sampling_params=SamplingParams(max_tokens=1))
            )
    assert sorted(output.request_id for output in finish(engine)) == ["r", "r1", "r2"]
    search(engine, 3, 3, max_tokens=4)  # free again
    assert len(finish(engine)) == 3
