"""A local JSONL through lm-eval on a real engine."""

import json
import math
import os
import socket

import pytest

from llmq.evals.harness import EngineLM
from llmq.evals.overlength import OnOverlength
from llmq.evals.own_set import read_own_set
from llmq.evals.own_task import as_lm_eval_task
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


def scores_of(run) -> list[dict[str, float]]:
    return [sample.scores for sample in run.samples]


def test_each_answer_counts_by_its_line_s_own_match(lm, tmp_path):
    prompts = ["the value", "an object", "return", "a class"]
    said = [
        s.answers[0]
        for s in run_tasks(
            lm, local(tmp_path / "a.jsonl", [{"prompt": p, "answer": "?", "match": "contains"} for p in prompts])
        ).samples
    ]
    middle = said[0].strip()[2:4]
    items = [
        {"prompt": prompts[0], "answer": middle, "match": "contains"},
        {"prompt": prompts[1], "answer": "^[^\x00]", "match": "regex"},
        {"prompt": prompts[2], "answer": 12345, "match": "numeric"},
        {"prompt": prompts[3], "answer": said[3].strip()},
    ]
    run = run_tasks(lm, local(tmp_path / "b.jsonl", items))
    assert [score["match"] for score in scores_of(run)] == [1.0, 1.0, 0.0, 1.0]
    assert run.scores[0].value == 0.75


def test_a_line_s_own_stop_and_limit_are_honoured(lm, tmp_path):
    whole = run_tasks(lm, local(tmp_path / "a.jsonl", [{"prompt": "the value", "answer": "x", "match": "contains"}]))
    text = whole.samples[0].answers[0]
    items = [
        {"prompt": "the value", "answer": "x", "match": "contains", "stop": text[3:5]},
        {"prompt": "the value", "answer": "x", "match": "contains", "max_tokens": 1},
    ]
    stopped, short = (s.answers[0] for s in run_tasks(lm, local(tmp_path / "b.jsonl", items)).samples)
    assert stopped == text.split(text[3:5])[0]
    assert len(short) < len(text)


def test_a_conversation_is_the_template_s_as_the_server_would_make_it(lm, tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    loaded = local(tmp_path / "chat.jsonl", [{"messages": messages, "answer": "hi"}])
    run = run_tasks(lm, loaded, apply_chat_template=True)
    assert run.samples[0].prompt_token_ids == lm._tokenizer.encode_chat(messages)


def test_texts_have_lm_eval_s_perplexities_and_each_a_likelihood_of_its_own(lm, tmp_path):
    texts = ["the value of an expression", "return an object of this class " * 20]
    run = run_tasks(lm, local(tmp_path / "texts.jsonl", [{"text": text} for text in texts]))
    values = {score.metric: score.value for score in run.scores}
    per_byte = [score["log_likelihood_per_byte"] for score in scores_of(run)]
    total = sum(one * len(text) for one, text in zip(per_byte, texts, strict=True))
    assert values["byte_perplexity"] == pytest.approx(math.exp(-total / sum(map(len, texts))))
    assert values["bits_per_byte"] == pytest.approx(math.log2(values["byte_perplexity"]))
    num_words = sum(len(text.split()) for text in texts)
    assert values["word_perplexity"] == pytest.approx(math.exp(-total / num_words))


def test_standard_errors_are_resampled_without_forked_processes(lm, tmp_path, monkeypatch):
    """A pool of them is ended by a signal, which a process of ours that has just been forked does not always die of."""
    monkeypatch.setattr("multiprocessing.Pool", lambda *_: pytest.fail("forked"))
    rows = [
        {"context": "He does not care about", "continuation": "signs"},
        {"context": "They care about the", "continuation": "value"},
    ]
    (tmp_path / "lambada_openai.test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    scores = run_tasks(lm, load_named_tasks(["lambada_openai"], tmp_path)).scores
    assert {score.metric: score.stderr > 0 for score in scores}["perplexity"]
    assert "DISABLE_MULTIPROC" not in os.environ


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


@pytest.fixture
def mixed(tmp_path) -> LoadedTasks:
    """Three choice items and two to answer; the second of each is longer than the model."""
    items = [{"query": q, "choices": ["of", "import"], "gold": 0} for q in ("the value", "value " * 300, "a class")]
    loaded = local(tmp_path / "mc.jsonl", items)
    items = [{"prompt": p, "answer": "x"} for p in ("the value", "object " * 300)]
    loaded.tasks.update(local(tmp_path / "gen.jsonl", items).tasks)
    return loaded


def run_with(engine, tokenizer, policy, loaded):
    return run_tasks(EngineLM(engine, tokenizer, on_overlength=OnOverlength(policy)), loaded)


def test_over_long_items_are_cut_by_default_and_counted(lm, mixed):
    run = run_tasks(lm, mixed)
    assert (run.counts.num_truncated, run.counts.num_left_out) == (3, 0)
    assert {score.task: score.num_items for score in run.scores} == {"mc": 3, "gen": 2}


def test_over_long_items_are_left_out_of_every_score(engine, lm, mixed):
    run = run_with(engine, lm._tokenizer, "skip", mixed)
    assert (run.counts.num_truncated, run.counts.num_left_out) == (0, 3)
    assert (run.counts.num_likelihoods, run.counts.num_generations) == (4, 1)
    assert {score.task: score.num_items for score in run.scores} == {"mc": 2, "gen": 1}
    assert [(sample.task, sample.doc_id) for sample in run.samples] == [("gen", 0), ("mc", 0), ("mc", 2)]
    mean = sum(sample.scores["acc"] for sample in run.samples[1:]) / 2
    assert next(score.value for score in run.scores if score.metric == "acc") == mean


def test_over_long_items_end_the_run_by_name(engine, lm, mixed, tmp_path):
    with pytest.raises(InputError, match=r"1 item\(s\) longer than the .* tokens .*: (mc|gen) 1 \([\d,]+ tokens\)"):
        run_with(engine, lm._tokenizer, "error", mixed)
    only = local(tmp_path / "only.jsonl", [{"prompt": "object " * 300, "answer": "x"}])
    with pytest.raises(InputError, match="skip leaves nothing of task only"):
        run_with(engine, lm._tokenizer, "skip", only)
