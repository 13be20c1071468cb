"""Case C30: the command answers at once, imports nothing heavy, and a typo is an answer."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmq.cli.verbs import VERBS

LLMQ = [sys.executable, "-m", "llmq"]


def run(*args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess:
    # A closed port for the hub: a verb that asks it fails at once, and loudly.
    settings = {"HF_ENDPOINT": "http://127.0.0.1:9", "COLUMNS": "100", **env}
    return subprocess.run(
        [*LLMQ, *args], capture_output=True, text=True, cwd=cwd, env={**os.environ, **settings}, timeout=120
    )


def test_version_is_one_line():
    done = run("--version")
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.startswith("llmq ")
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("args", [["--version"], ["--help"], *([verb, "--help"] for verb in VERBS)])
def test_an_answer_costs_no_torch_and_little_time(args):
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *LLMQ[1:], *args], capture_output=True, text=True, timeout=60
    )
    seconds = time.perf_counter() - started
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    for heavy in ("torch", "transformers", "fastapi", "numpy", "huggingface_hub"):
        assert heavy not in imported
    # 0.15 s on a quiet machine; the bound is for a busy one.
    assert seconds < 5


def test_help_lists_every_verb():
    done = run("--help")
    for verb, summary in VERBS.items():
        assert verb in done.stdout
        assert summary.split()[0] in done.stdout


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["doctr"], "did you mean 'doctor'?"),
        (["kv"], "did you mean 'kv-budget'?"),
        (["frobnicate"], "the verbs are: quickstart, kv-budget"),
        (["doctor", "--jason"], "--json"),
        (["kv-budget", "x", "--kv_dtype", "fp8"], "--kv-dtype"),
        (["--verson"], "--version"),
    ],
)
def test_a_mistyped_verb_or_flag_gets_the_nearest_one(args, hint):
    done = run(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert hint in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", ["kv-budget", "inspect", "eval", "serve", "quantize"])
def test_c30_a_mistyped_path_names_the_nearest_folder(tmp_path, verb):
    (tmp_path / "smol").mkdir()
    done = run(verb, "./smoll", *(["--awq", "-o", "out"] if verb == "quantize" else []), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "llmq: no such folder ./smoll (did you mean ./smol?)\n"


def test_offline_a_hub_id_is_an_answer(tmp_path):
    done = run("kv-budget", "org/name", HF_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "http://127.0.0.1:9 cannot be reached, and org/name is not in the cache" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_verb_is_a_question_for_help():
    done = run()
    assert done.returncode == 2
    assert "kv-budget" in done.stdout + done.stderr


@pytest.mark.parametrize("module", ["typer", "llmq.cli.doctor"])
def test_ctrl_c_while_modules_are_imported_is_no_traceback(module):
    """An interrupt at the moment when `module` is looked for, as if a hand had been that quick."""
    script = f"""
import os, signal, sys

class Hand:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Hand())
sys.argv = ["llmq", "doctor"]
from llmq.cli.main import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert (done.stdout, done.stderr.strip()) == ("", "")


def test_a_pipe_that_closes_is_no_traceback():
    with subprocess.Popen([*LLMQ, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert "Traceback" not in errors


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["kv-budget", "CONFIG"], ["kv-budget", "CONFIG", "--json"]], ids=len)
def test_a_full_disk_under_stdout_is_a_message(tiny_llama, arguments):
    folder = str(tiny_llama())
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*LLMQ, *(folder if one == "CONFIG" else one for one in arguments)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert re.fullmatch(r"llmq: .*No space left on device\n", done.stderr)


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_a_pipe_that_nobody_reads_any_more_is_a_message(tiny_llama, json_flag):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*LLMQ, "kv-budget", str(tiny_llama()), *json_flag], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(write)
    assert done.returncode == 1
    assert done.stderr == "llmq: standard output took only a part of the result: Broken pipe\n"


def test_a_result_without_a_stdout_is_a_message(tiny_llama):
    command = shlex.join([*LLMQ, "kv-budget", str(tiny_llama())])
    done = subprocess.run(["sh", "-c", f"{command} >&-"], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "llmq: standard output is closed: there is nowhere to write the result\n"
