"""lm-eval's own tasks on local files: the prompts are the ones lm-eval makes of the hub's rows."""

import json

import pytest

from llmq.evals.local_data import local_data_sets
from llmq.evals.tasks import load_named_tasks
from llmq.profiles.errors import InputError

ROWS = {
    "arc_easy.test": {"query": "Question: What is hot?", "choices": ["ice", "fire"], "gold": 1},
    "hellaswag.val": {
        "query": "Roof shingle removal: A man is sitting on a roof. he",
        "choices": ["sleeps.", "starts pulling up roofing."],
        "gold": 1,
    },
    "lambada_openai.test": {"context": "He does not care about", "continuation": "signs"},
    "piqa.valid": {"goal": "Open it", "sol1": "by hand", "sol2": "by foot", "label": 0},
    "winogrande_xl.dev": {
        "context_options": ["Sarah was better than Maria so Sarah", "Sarah was better than Maria so Maria"],
        "continuation": "got the easier cases.",
        "gold": 1,
    },
    "boolq.val": {"query": "Passage: All is\nwell.\nQuestion: is all well?", "choices": ["no", "yes"], "gold": 1},
    "copa.val": {"query": "The woman retired, therefore", "choices": ["she received it.", "she paid."], "gold": 0},
    "openbookqa.test": {"query": "The best way is to", "choices": ["wait", "go"], "gold": 1},
    "truthfulqa_mc.val": {
        "question": "What now?",
        "mc1_targets": {"You die.": 0, "Nothing.": 1},
        "mc2_targets": {"You die.": 0, "Nothing.": 1, "Little.": 1},
    },
    "gsm8k.test": {"question": "2+2?", "answer": "It is <<2+2=4>>4.\n#### 4"},
    "gsm8k.train-first256": {"question": "1+1?", "answer": "#### 2"},
    "mmlu.test-20per-subject": {
        "subject": "anatomy", "index": 0, "question": "Which bone?", "choices": ["a", "b", "c", "d"], "answer": 2,
    },
    "mmlu.dev": {
        "subject": "anatomy", "index": 0, "question": "Shot?", "choices": ["e", "f", "g", "h"], "answer": 0,
    },
}  # fmt: skip

# task -> (prompt, choices or target, the right one): by hand from lm-eval's YAML and the hub's rows.
EXPECTED = {
    "arc_easy": ("Question: What is hot?\nAnswer:", ["ice", "fire"], 1),
    "hellaswag": (
        "Roof shingle removal: A man is sitting on a roof. He",
        ["sleeps.", "starts pulling up roofing."],
        1,
    ),
    "lambada_openai": ("He does not care about", None, " signs"),
    "piqa": ("Question: Open it\nAnswer:", ["by hand", "by foot"], 0),
    "boolq": ("All is\nwell.\nQuestion: is all well?\nAnswer:", ["no", "yes"], 1),
    "copa": ("The woman retired therefore", [" she received it.", " she paid."], " she received it."),
    "openbookqa": ("The best way is to", ["wait", "go"], 1),
    "gsm8k": ("Question: 2+2?\nAnswer:", None, "It is <<2+2=4>>4.\n#### 4"),
    "mmlu_anatomy": ("Which bone?\nA. a\nB. b\nC. c\nD. d\nAnswer:", ["A", "B", "C", "D"], 2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    for name, row in ROWS.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return folder


@pytest.fixture(scope="module")
def tasks(folder):
    names = [*EXPECTED, "winogrande", "truthfulqa_mc1", "truthfulqa_mc2"]
    return load_named_tasks(names, data_dir=folder).tasks


@pytest.mark.parametrize("name", EXPECTED)
def test_prompts_are_what_lm_eval_makes_of_the_hubs_rows(tasks, name):
    task = tasks[name]
    (doc,) = task.eval_docs
    prompt, choices, target = EXPECTED[name]
    assert task.doc_to_text(doc) == prompt
    if choices is not None:
        assert list(task.doc_to_choice(doc)) == choices
    assert task.doc_to_target(doc) == target


def test_winogrande_scores_the_end_after_either_name(tasks):
    (doc,) = tasks["winogrande"].eval_docs
    assert tasks["winogrande"].doc_to_choice(doc) == [
        "Sarah was better than Maria so Sarah", "Sarah was better than Maria so Maria",
    ]  # fmt: skip
    assert tasks["winogrande"].doc_to_target(doc) == "got the easier cases."
    assert tasks["winogrande"].doc_to_text(doc) == 1


def test_truthfulqa_has_its_true_answers_first(tasks):
    (doc,) = tasks["truthfulqa_mc2"].eval_docs
    assert tasks["truthfulqa_mc1"].doc_to_choice(doc) == ["Nothing.", "You die."]
    assert doc["mc2_targets"]["labels"] == [1, 1, 0]
    assert tasks["truthfulqa_mc1"].doc_to_text(doc).endswith("\n\nQ: What now?\nA:")


def test_few_shot_examples_come_from_their_own_split(tasks):
    assert [doc["question"] for doc in tasks["gsm8k"].fewshot_docs()] == ["1+1?"]
    assert [doc["question"] for doc in tasks["mmlu_anatomy"].fewshot_docs()] == ["Shot?"]


def test_what_is_missing_or_wrong_is_named(tmp_path):
    with pytest.raises(InputError, match="no such folder"), local_data_sets(tmp_path / "none"):
        pass
    with pytest.raises(InputError, match=r"has no arc_easy\.SPLIT\.jsonl"):
        load_named_tasks(["arc_easy"], data_dir=tmp_path)
    (tmp_path / "arc_easy.test.jsonl").write_text('{"query": "x"}\n')
    with pytest.raises(InputError, match=r"arc_easy\.test\.jsonl, line 1: no row of arc_easy"):
        load_named_tasks(["arc_easy"], data_dir=tmp_path)
    with pytest.raises(InputError, match="knows no layout of the data set"):
        load_named_tasks(["sciq"], data_dir=tmp_path)


def test_the_published_files_load_whole(shared):
    folder = shared / "data" / "tasks"
    counts = {"arc_easy": 2376, "hellaswag": 10042, "lambada_openai": 5153, "piqa": 1838, "winogrande": 1267}
    counts |= {"boolq": 3270, "copa": 100, "openbookqa": 500, "truthfulqa_mc1": 817, "gsm8k": 1319}
    counts |= {"mmlu_astronomy": 20}
    loaded = load_named_tasks([*counts], data_dir=folder).tasks
    assert {name: len(task.eval_docs) for name, task in loaded.items()} == counts
