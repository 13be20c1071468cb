"""A local JSONL through lm-eval on a real engine."""

import json
import socket

import pytest

from llmq.evals.harness import EngineLM
from llmq.evals.own_set import as_lm_eval_task, read_own_set
from llmq.evals.task_run import run_tasks
from llmq.evals.tasks import LoadedTasks, load_named_tasks
from llmq.profiles.errors import InputError
from llmq.runtime.frontend.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def engine(tiny_llama):
    from llmq.runtime.config import EngineConfig
    from llmq.runtime.engine import Engine

    config = EngineConfig(model=str(tiny_llama()), device="cpu", kv_cache_memory_bytes=8 << 20, threads=1)
    return Engine.from_config(config)


@pytest.fixture
def lm(engine, tiny_llama) -> EngineLM:
    return EngineLM(engine, Tokenizer.from_folder(tiny_llama()))


def local(path, items) -> LoadedTasks:
    path.write_text("\n".join(map(json.dumps, items)))
    return LoadedTasks({path.stem: as_lm_eval_task(read_own_set(path), 8)})


def test_multiple_choice_picks_the_likelier_continuation(lm, tmp_path):
    contexts = ["the value", "an object", "return", "a class"]
    items = [{"query": context, "choices": ["of", "import", "is not"], "gold": 0} for context in contexts]
    run = run_tasks(lm, local(tmp_path / "mine.jsonl", items))
    samples = run.samples
    assert samples[0].prompt == "the value"
    assert samples[0].prompt_token_ids == lm.tok_encode("the value of")
    picked = [max(range(3), key=lambda i, s=s: float(s.answers[i][0])) for s in samples]
    assert [sample.scores["acc"] for sample in samples] == [float(choice == 0) for choice in picked]
    accuracy = next(score for score in run.scores if score.metric == "acc")
    assert (accuracy.value, accuracy.num_items, accuracy.num_fewshot) == (picked.count(0) / 4, 4, 0)
    assert run.counts.num_likelihoods == 12


def test_a_group_sums_up_its_tasks_over_all_of_their_items(lm, tmp_path):
    from lm_eval.api.group import Group
    from lm_eval.config.group import AggMetricConfig

    sets = {"a": ["the value", "an object"], "b": ["return"]}
    loaded = LoadedTasks(groups={"both": Group("both", aggregate_metric_list=[AggMetricConfig("acc")])})
    for name, contexts in sets.items():
        items = [{"query": context, "choices": ["of", "import"], "gold": 0} for context in contexts]
        loaded.tasks[name] = local(tmp_path / f"{name}.jsonl", items).tasks[name]
        loaded.groups["both"].add(loaded.tasks[name])
    scores = {score.task: score for score in run_tasks(lm, loaded).scores if score.metric == "acc"}
    assert scores["both"].num_items == 3
    assert scores["both"].value == pytest.approx((2 * scores["a"].value + scores["b"].value) / 3)


def test_generation_counts_an_answer_equal_up_to_white_space(lm, tmp_path):
    items = [{"prompt": p, "answer": "?"} for p in ("the value", "an object")]
    first = run_tasks(lm, local(tmp_path / "a.jsonl", items))
    said = [sample.answers[0] for sample in first.samples]
    items = [{"prompt": "the value", "answer": f" {said[0].strip()}\n"}, {"prompt": "an object", "answer": "no such"}]
    run = run_tasks(lm, local(tmp_path / "b.jsonl", items), num_fewshot=0)
    assert [(s.metric, s.value) for s in run.scores] == [("exact_match", 0.5)]


def test_limit_few_shot_and_chat_template_reach_the_prompts(lm, tmp_path):
    items = [{"prompt": f"question {i}", "answer": f"answer {i}"} for i in range(6)]
    run = run_tasks(lm, local(tmp_path / "chat.jsonl", items), limit=3, num_fewshot=2, apply_chat_template=True)
    prompts = [sample.prompt for sample in run.samples]
    assert len(prompts) == 3
    assert all(prompt.count("<|im_start|>user") == 3 for prompt in prompts)
    assert prompts[1].endswith("question 1<|im_end|>\n<|im_start|>assistant\n")
    assert run.first_token_ids[0] == 1
    assert run.first_token_ids[1] != 1


def test_a_model_without_a_template_is_refused_before_any_work(lm, monkeypatch):
    monkeypatch.setattr(lm._tokenizer, "chat_template", None)
    with pytest.raises(InputError, match="this model has no chat template"):
        run_tasks(lm, LoadedTasks(), apply_chat_template=True)


def test_a_task_whose_data_cannot_be_reached_is_refused_naming_the_data(monkeypatch):
    import datasets.config
    import huggingface_hub.constants as hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)  # both are put back afterwards
    with socket.socket() as free:  # bound and not listening: every connection is refused
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(hub, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
        with pytest.raises(InputError, match=r"task arc_easy: its data, allenai/ai2_arc \(ARC-Easy\), could not be"):
            load_named_tasks(["arc_easy"])


def test_a_mistyped_task_gets_the_nearest_names(monkeypatch):
    from lm_eval.tasks import TaskManager

    from llmq.evals import tasks

    arc = tasks._folders_that_name(["arc_easy"])
    assert "arc" in [folder.name for folder in arc]
    monkeypatch.setattr(tasks, "_index_of_all", lambda: TaskManager(include_defaults=False, include_path=arc))
    with pytest.raises(InputError, match=r"lm-eval has no task 'arc_eazy' .*arc_easy"):
        load_named_tasks(["arc_eazy"])
