"""The verb, in this process, on a tiny model."""

import json
import math
import subprocess
import sys

import pytest
import torch

from llmq.cli.main import main


@pytest.fixture
def llmq(monkeypatch, capsys):
    """llmq(*arguments) -> (exit code, stdout, stderr)."""

    def run(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["llmq", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        out, err = capsys.readouterr()
        return exit_info.value.code or 0, out, err

    return run


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("The value of an expression, or of a class, is an object.\nimport returns it.\n" * 30)
    return path


def strided_nll(folder, text: str, window: int, stride: int) -> tuple[list[float], int]:
    """NLL of every token but the first, each with as much context as overlapping windows give it, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    nll, scored_to = [], 1
    for begin in range(0, len(ids), stride):
        part = torch.tensor([ids[begin : begin + window]])
        with torch.no_grad():
            log_probs = model(part).logits[0, :-1].log_softmax(-1)
        token_nll = -log_probs.gather(-1, part[0, 1:, None])[:, 0]  # [i]: of token begin + 1 + i
        nll += token_nll[scored_to - begin - 1 :].tolist()
        scored_to = begin + part.shape[1]
        if scored_to == len(ids):
            return nll, len(ids)
    raise AssertionError


def test_perplexity_equals_an_independent_computation_each_token_scored_once(llmq, tiny_llama, text_file):
    """C16."""
    folder, text = tiny_llama(), text_file.read_text()
    code, out, _ = llmq("eval", folder, "--ppl", text_file, "--window", 64, "--stride", 32, "--json", "--threads", 1)
    assert code == 0
    record = json.loads(out)
    measured = record["text"]["perplexity"]
    nll, num_tokens = strided_nll(folder, text, 64, 32)
    assert measured["num_scored"] == len(nll) == num_tokens - 1
    assert measured["token_ppl"] == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-4)
    mean = sum(nll) / len(nll)
    assert measured["word_ppl"] == pytest.approx(math.exp(mean * num_tokens / len(text.split())), rel=1e-4)
    assert measured["bits_per_byte"] == pytest.approx(mean / math.log(2) * num_tokens / len(text), rel=1e-4)
    assert (measured["window"], measured["stride"]) == (64, 32)
    assert record["text"]["first_token_ids"][0] != 1
    assert record["model"]["fingerprint"]["dtype"] == "fp32"


def test_the_table_names_every_measure_with_its_definition_and_the_options(llmq, tiny_llama, text_file):
    _, out, err = llmq("eval", tiny_llama(), "--ppl", text_file, "--window", 64, "--stride", 32, "--threads", 1)
    for name in (
        "token perplexity",
        "word perplexity",
        "bits per byte",
        "stride 32",
        "of 64",
        "exp of the mean negative",
    ):
        assert name in out
    assert "no BOS" in err
    assert "first ids [" in err


def test_divergence_equals_transformers_on_two_models_and_is_zero_for_one(llmq, tiny_llama, text_file, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base, cand = tiny_llama(), tiny_llama(rms_norm_eps=0.1)
    saved = tmp_path / "result.json"
    arguments = ["--ppl", text_file, "--window", 100, "--limit", 2, "--threads", 1, "--json"]
    code, out, _ = llmq("eval", cand, "--baseline", base, "-o", saved, *arguments)
    assert code == 0
    assert json.loads(saved.read_text()) == json.loads(out)
    measured = json.loads(out)["text"]["divergence"]

    ids = AutoTokenizer.from_pretrained(base).encode(text_file.read_text())
    kl, same = [], []
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (base, cand)]
    for begin in (0, 100):
        part = torch.tensor([ids[begin : begin + 100]])
        with torch.no_grad():
            p, q = (model(part).logits[0, :-1].log_softmax(-1) for model in models)
        kl += (p.exp() * (p - q)).sum(-1).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
    assert measured["num_positions"] == 198
    assert measured["mean_kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-3)
    assert measured["max_kl"] == pytest.approx(max(kl), rel=1e-3)
    assert measured["top1_agreement"] == pytest.approx(sum(same) / len(same))

    _, out, _ = llmq("eval", base, "--baseline", base, *arguments)
    itself = json.loads(out)["text"]["divergence"]
    assert (itself["mean_kl"], itself["top1_agreement"]) == (0.0, 1.0)
    assert itself["baseline"]["token_ppl"] == itself["candidate"]["token_ppl"]


def test_a_local_task_through_the_chat_template_has_one_bos(llmq, tiny_llama, tmp_path):
    """C12: the ids that were sent, with the template and without."""
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"question {i}", "answer": "x"}) for i in range(5)))
    arguments = ["eval", tiny_llama(), "--data", path, "--json", "--threads", 1]
    _, out, _ = llmq(*arguments, "--apply-chat-template")
    with_template = json.loads(out)["tasks"]
    assert with_template["first_token_ids"][0] == 1
    assert with_template["first_token_ids"].count(1) == 1
    assert [s["num_items"] for s in with_template["scores"]] == [5]
    _, out, _ = llmq(*arguments)
    assert 1 not in json.loads(out)["tasks"]["first_token_ids"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ppl", "absent.txt"], "the text absent.txt cannot be read: No such file"),
        (["--window", "512"], "--window 512 is longer than this model's context of 256 tokens"),
        (["--window", "100", "--stride", "101"], "stride 101 is outside 1..100"),
        (["--num-fewshot", "2"], "give --tasks or --data"),
        (["--tasks", "x", "--stride", "2"], "give --ppl with them"),
        (["--on-overlength", "skip"], "give --tasks or --data"),
        (["--data", "x.jsonl", "--on-overlength", "drop"], "--on-overlength drop: one of error, skip, truncate"),
        (["--dtype", "int7"], "--dtype int7: one of auto, bf16"),
        (["-o", "no/such/r.json"], "there is no folder"),
        (["--tasks", ","], "names no task"),
        (["--tasks", "arc_easy,helaswag_x"], "no task 'helaswag_x' (near: hellaswag"),
        (["--data", "absent.jsonl"], "absent.jsonl: No such file"),
    ],
)
def test_wrong_usage_exits_2_and_says_what_would_work(llmq, tiny_llama, arguments, message):
    code, out, err = llmq("eval", tiny_llama(), *arguments)
    assert code == 2
    assert message in err
    assert not out
    assert "Traceback" not in err


def test_an_unknown_task_is_refused_before_anything_heavy_is_imported():
    """Also before the model is looked for: this one is not there."""
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from llmq.cli.eval import app\n"
        "done = CliRunner().invoke(app, ['no-such-model', '--tasks', 'arc_eazy'])\n"
        "print(done.exception, {'torch', 'lm_eval', 'transformers', 'datasets'} & set(sys.modules))\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60).stdout
    assert "lm-eval has no task 'arc_eazy' (near: arc_easy" in said
    assert said.rstrip().endswith("set()")


@pytest.fixture
def own_set(tmp_path):
    path = tmp_path / "mine.jsonl"
    words = ["value", "object", "class", "import", "return", "name"]
    items = [
        {
            "query": f"the {words[i % 6]} of {words[(i * 7) % 6]} {i}",
            "choices": [" is", " or", " the value"],
            "gold": i % 3,
        }
        for i in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, items)))
    return path


def test_a_model_against_itself_passes_only_with_items_enough(llmq, tiny_llama, own_set, tmp_path):
    folder, saved = tiny_llama(), tmp_path / "r.json"
    options = ("--data", own_set, "--threads", 1, "--baseline", folder, "-o", saved)
    code, out, _ = llmq("eval", folder, *options, "--max-drop", "20%")
    assert code == 0
    assert "PASS: with 95 % confidence the drop is below 7.22%" in out  # Clopper-Pearson: 1 - 0.05^(1/40)
    record = json.loads(saved.read_text())
    assert record["comparison"]["overall"]["lost"] == record["comparison"]["overall"]["won"] == 0
    assert record["text"]["divergence"]["mean_kl"] == 0
    assert sorted(path.name for path in tmp_path.glob("r.*")) == [
        "r.baseline.samples.jsonl",
        "r.json",
        "r.samples.jsonl",
    ]
    code, out, _ = llmq("eval", "compare", saved, tmp_path / "r.baseline.samples.jsonl", "--max-drop", "0.01")
    assert code == 3
    assert "NOT ENOUGH ITEMS" in out


def test_a_broken_model_fails_against_a_saved_baseline_in_any_order(llmq, tiny_llama, own_set, tmp_path):
    good, saved = tiny_llama(), tmp_path / "good.json"
    assert llmq("eval", good, "--data", own_set, "--threads", 1, "-o", saved)[0] == 0
    lines = (tmp_path / "good.samples.jsonl").read_text().splitlines()
    right = []
    for line in lines[:0:-1]:  # the last item first
        sample = json.loads(line)
        sample["scores"] = {"acc": 1.0, "acc_norm": 1.0}
        right.append(json.dumps(sample))
    (tmp_path / "good.samples.jsonl").write_text("\n".join([lines[0], *right]) + "\n")
    code, out, _ = llmq(
        "eval", good, "--data", own_set, "--threads", 1, "--baseline", saved, "--max-drop", "1%", "--json"
    )
    assert code == 1
    comparison = json.loads(out)["comparison"]
    assert comparison["verdict"] == "FAIL"
    assert comparison["overall"]["baseline"] == 1.0
    assert comparison["overall"]["lost"] > 10


def test_unequal_sets_are_refused_naming_an_item(llmq, tiny_llama, own_set, tmp_path):
    folder = tiny_llama()
    for name, limit in (("a", 10), ("b", 12)):
        llmq("eval", folder, "--data", own_set, "--threads", 1, "--limit", limit, "-o", tmp_path / f"{name}.json")
    code, _, err = llmq("eval", "compare", tmp_path / "a.json", tmp_path / "b.json")
    assert code == 2
    assert "2 of the candidate's are not among them (first: task mine, item 10)" in err


def test_a_killed_run_goes_on_and_another_model_is_refused(llmq, tiny_llama, own_set, tmp_path):
    """C15."""
    folder, saved = tiny_llama(), tmp_path / "r.json"
    whole = tmp_path / "whole.json"
    # The items that are left meet in other batches: only so are their scores equal to the last bit.
    options = ["--data", str(own_set), "--threads", "1", "--batch-invariant"]
    assert llmq("eval", folder, *options, "-o", whole)[0] == 0

    log = tmp_path / "r.model.answers.jsonl"
    # Dies after the 20th answer, as a kill -9 would: no handler runs, nothing is flushed that was not before.
    dying = (
        "import os, sys\nfrom llmq.evals.answer_log import AnswerLog\nadd, n = AnswerLog.add, [0]\n"
        "def counted(self, key, answer):\n    add(self, key, answer); n[0] += 1\n"
        "    if n[0] == 20: os.kill(os.getpid(), 9)\nAnswerLog.add = counted\n"
        "sys.argv = ['llmq', *sys.argv[1:]]\nfrom llmq.cli.main import main\nmain()"
    )
    killed = subprocess.run([sys.executable, "-c", dying, "eval", str(folder), *options, "-o", str(saved)])
    assert killed.returncode == -9
    assert len(log.read_bytes().splitlines()) == 21
    other = tiny_llama(num_hidden_layers=1)
    code, _, err = llmq("eval", other, *options, "-o", saved)
    assert code == 2
    assert "answers of another run" in err
    assert "model.sha256 was" in err
    code, _, err = llmq("eval", folder, *options, "-o", saved)
    assert code == 0
    assert "20 answers of an earlier run" in err
    assert not log.exists()
    assert json.loads(saved.read_text())["tasks"] == json.loads(whole.read_text())["tasks"]
    assert (tmp_path / "r.samples.jsonl").read_text() == (tmp_path / "whole.samples.jsonl").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-drop", "1%"], "give --baseline and --tasks or --data"),
        (["--baseline", "saved.json"], "is a saved result, whose items are compared: give --tasks or --data"),
        (["--data", "mine.jsonl", "--baseline", "MODEL", "--max-drop", "much"], "a share such as 1% or 0.01"),
        (["--data", "mine.jsonl", "--baseline", "MODEL", "--max-drop", "5"], "for 5 per cent write 5%"),
    ],
)
def test_what_a_verdict_needs_is_asked_for(llmq, tiny_llama, arguments, message):
    folder = tiny_llama()
    code, _, err = llmq("eval", folder, *[str(folder) if a == "MODEL" else a for a in arguments])
    assert code == 2
    assert message in " ".join(err.split())


def test_a_set_of_each_kind_of_line_is_quiet_when_piped(tiny_llama, tmp_path):
    """A program of its own, whose stderr is a pipe: no bar and no remark of a library's."""
    sets = {
        "numbers": [{"prompt": "2 + 2 =", "answer": 4, "match": "numeric", "max_tokens": 4}],
        "chat": [{"messages": [{"role": "user", "content": "hi"}], "answer": "hi", "max_tokens": 4}],
        "texts": [{"text": "the value of an expression"}],
    }
    metrics = {"numbers": {"match"}, "chat": {"exact_match"}, "texts": {"byte_perplexity", "bits_per_byte"}}
    program = [sys.executable, "-m", "llmq", "eval", str(tiny_llama()), "--threads", "1", "--json"]
    for name, lines in sets.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)))
        options = ["--apply-chat-template"] if name == "chat" else []
        done = subprocess.run([*program, "--data", str(path), *options], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert metrics[name] <= {score["metric"] for score in json.loads(done.stdout)["tasks"]["scores"]}
        assert "kwargs" not in done.stderr
        assert "it/s" not in done.stderr
        assert "examples/s" not in done.stderr


def test_answers_that_were_cut_are_warned_of_above_two_per_cent(monkeypatch):
    from llmq.cli import eval_tables
    from llmq.evals.counts import HarnessCounts
    from llmq.evals.task_run import TaskRun

    said = []
    monkeypatch.setattr(eval_tables.console, "warn", lambda text: said.append(("warning", text)))
    monkeypatch.setattr(eval_tables.console, "status", lambda text: said.append(("remark", text)))
    counts = HarnessCounts(num_generations=100, num_hit_cap=3, num_empty=2)
    eval_tables.say_suspect_generations(TaskRun([], counts, [], []))
    assert said == [
        ("warning", "3 of 100 generations (3.0%) ended at max_gen_toks"),
        ("remark", "2 of 100 generations (2.0%) came back empty"),
    ]
