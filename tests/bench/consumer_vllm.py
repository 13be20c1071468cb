"""Greedy tokens of checkpoints by vLLM: `consumer_vllm.py JOB.json`, by a Python that has it; see `bench_consumers.py`.

One process and few threads: its workers spin on a machine with few cores.
"""

import gc
import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# Its log goes to stdout too.
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")


def generate(folder: str, job: dict[str, Any]) -> list[list[int]]:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = None
    try:
        llm = LLM(
            model=folder,
            dtype="auto",
            max_model_len=512,
            max_num_seqs=len(job["prompts"]),
            enable_prefix_caching=False,
            enforce_eager=True,
            generation_config="vllm",  # the folder's own would bring its samplers
            distributed_executor_backend="uni",
        )
        params = SamplingParams(temperature=0, max_tokens=job["num_tokens"], ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def main(path: str) -> None:
    with open(path) as file:
        job = json.load(file)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{job['threads'] - 1}" if job["threads"] > 1 else "0")
    for name, folder in job["folders"].items():
        print(json.dumps({"started": name}), flush=True)
        try:
            answer = {"tokens": generate(folder, job)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"name": name, **answer}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
