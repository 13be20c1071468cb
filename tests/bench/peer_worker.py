"""One engine held at work: `peer_worker.py WORKLOAD_FOLDER CONTEXT SCRIPT ARGUMENT...`, by the Python that has it.

SCRIPT makes an engine and hands `generate` to `workload.measure`, as the scripts of the shared folder `peers` do. Here
that name does not measure all at once: works are read from stdin, a line of JSON each, and each is answered with what
it took, so that `bench_peers.py` can let engines take turns. CONTEXT: the longest request, in tokens, where a script
has a limit of its own. Needs nothing but Python: it runs in environments that have no llmq.
"""

import ctypes
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Request = tuple[list[int], int]
Generate = Callable[[list[Request]], int]


def decode(workload: Any, generate: Generate, size: int, turn: int) -> dict[str, Any]:
    """Of a single sequence: 128 tokens after a prompt of 128, without what the first of them takes."""
    first = timed(generate, [(workload.prompt(128, 100 + turn), 1)])
    whole = timed(generate, [(workload.prompt(128, 200 + turn), 128)])
    weights = getattr(generate, "weights_read_bytes", lambda: None)()  # where the engine can say
    return {"seconds": whole - first, "tokens": 127, "weights_read_bytes": weights}


def streams(workload: Any, generate: Generate, size: int, turn: int) -> dict[str, Any]:
    """`size` requests of mixed lengths that come at once; their output tokens."""
    requests = workload.mixed(size, 1234 + turn)
    return {"seconds": timed(generate, requests), "tokens": sum(new for _, new in requests)}


def prefill(workload: Any, generate: Generate, size: int, turn: int) -> dict[str, Any]:
    """A prompt of `size` tokens and one new one."""
    return {"seconds": timed(generate, [(workload.prompt(size, 300 + turn), 1)]), "tokens": size}


WORKS = {work.__name__: work for work in (decode, streams, prefill)}


def timed(generate: Generate, requests: list[Request]) -> float:
    start = time.perf_counter()
    made = generate(requests)
    seconds = time.perf_counter() - start
    wanted = sum(new for _, new in requests)
    if made != wanted:
        raise RuntimeError(f"made {made} of {wanted} tokens")
    return seconds


def serve(workload: Any, answers: Any, generate: Generate) -> None:
    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    generate([(workload.prompt(128, 7), 1)])
    answer({"seconds": workload.process_age_s()})
    generate([(workload.prompt(128, 8), 16)])
    for line in sys.stdin:
        job = json.loads(line)
        try:
            took = WORKS[job["work"]](workload, generate, job["size"], job["turn"])
            answer(took | {"peak_bytes": workload.peak_rss_mib() << 20})  # so far
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


def widen_llamacpp(context: int) -> None:
    """The shared script gives each sequence 1,024 tokens."""
    import llama_cpp

    inner = llama_cpp.llama_init_from_model

    def init_from_model(model: Any, params: Any) -> Any:
        params.n_ctx = max(params.n_ctx, params.n_seq_max * context)
        return inner(model, params)

    llama_cpp.llama_init_from_model = init_from_model


def widen_vllm(context: int) -> None:
    """The shared script serves up to 2,048 tokens."""
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm

    inner = vllm.LLM
    vllm.LLM = lambda **settings: inner(**settings | {"max_model_len": max(context, settings["max_model_len"])})


WIDEN = {"peer_llamacpp": widen_llamacpp, "peer_vllm": widen_vllm}


def main(arguments: Sequence[str]) -> None:
    workload_folder, context, script, *rest = arguments
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)  # it may stand stopped when its parent ends
    answers = os.fdopen(os.dup(1), "w")  # engines write to stdout too
    os.dup2(2, 1)
    sys.path[:0] = [str(Path(script).parent), workload_folder]
    import workload

    workload.measure = lambda name, generate, *_: serve(workload, answers, generate)
    if (widen := WIDEN.get(Path(script).stem)) is not None:
        widen(int(context))
    sys.argv = [script, *rest]
    runpy.run_path(script, run_name="__main__")
    answers.flush()
    os._exit(0)  # what engines do at their end is not measured


if __name__ == "__main__":
    main(sys.argv[1:])
