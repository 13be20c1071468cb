import pytest

from llmq.evals.comparison import compare_samples
from llmq.evals.samples import Sample
from llmq.profiles.errors import InputError


def sample(doc_id: int, **scores: float) -> Sample:
    return Sample("mine", doc_id, f"hash {doc_id}", "p", [1], "t", [], scores)


def test_items_are_paired_by_what_they_are_and_not_by_their_place():
    baseline = [sample(0, acc=1.0), sample(1, acc=0.0), sample(2, acc=1.0)]
    candidate = [sample(2, acc=0.0), sample(0, acc=1.0), sample(1, acc=0.0)]
    overall = compare_samples(baseline, candidate).overall
    assert (overall.lost, overall.won, overall.num_items) == (1, 0, 3)


def test_an_item_without_its_tasks_score_is_named_and_not_counted_as_wrong():
    baseline = [sample(0, acc=1.0), sample(1, acc=1.0)]
    with pytest.raises(InputError, match="task mine, item 1: it has no acc"):
        compare_samples(baseline, [sample(0, acc=1.0), sample(1)])
