"""llama.cpp's speculation as pip installs it (llama-cpp-python), held at work for `bench_speculative.py`.

    peer_llamacpp_lookup.py MODEL.gguf CONTEXT NUM_TOKENS THREADS

Its speculation is prompt lookup over one sequence: NUM_TOKENS are guessed at once. Works are read from stdin, a line of
JSON each: {"prompts": [[token id, ...], ...], "tokens": most of an answer, "speculates": bool}; each is answered with
what it took. Needs nothing but llama-cpp-python: it runs in an environment that has no llmq.
"""

import json
import os
import sys
import time
from typing import Any

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


class Counted:
    """A drafter that counts what it guessed."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.num_guessed = inner, 0

    def __call__(self, input_ids: Any, **options: Any) -> Any:
        guessed = self._inner(input_ids, **options)
        self.num_guessed += len(guessed)
        return guessed


def answer(model: Llama, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """Greedy, timed from the first token on. `passes`: evaluations after the prompt's."""
    evaluate, passes = model.eval, 0

    def counted(tokens: Any) -> None:
        nonlocal passes
        passes += 1
        evaluate(tokens)

    model.reset()
    model.eval = counted
    written: list[int] = []
    try:
        for token in model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0, reset=True):
            if not written:
                start, passes = time.perf_counter(), 0
            if token == model.token_eos():
                break
            written.append(token)
            if len(written) == num_tokens:
                break
        seconds = time.perf_counter() - start
    finally:
        model.eval = evaluate
    return {"seconds": seconds, "passes": passes, "token_ids": written}


def main() -> None:
    gguf, context, num_guesses, threads = sys.argv[1], *map(int, sys.argv[2:])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints
    drafter = Counted(LlamaPromptLookupDecoding(num_pred_tokens=num_guesses))
    # logits_all, which speculation needs, keeps the logits of each token: both have it.
    model = Llama(gguf, n_ctx=context, n_threads=threads, n_threads_batch=threads, logits_all=True, verbose=False)
    for line in sys.stdin:
        job = json.loads(line)
        model.draft_model, guessed_before = (drafter if job["speculates"] else None), drafter.num_guessed
        made = [answer(model, prompt, job["tokens"]) for prompt in job["prompts"]]
        print(
            json.dumps(
                {
                    "seconds": sum(one["seconds"] for one in made),
                    "num_tokens": sum(len(one["token_ids"]) - 1 for one in made),
                    "passes": sum(one["passes"] for one in made),
                    "draft_tokens": drafter.num_guessed - guessed_before,
                    "token_ids": [one["token_ids"] for one in made],
                }
            ),
            file=answers,
            flush=True,
        )


if __name__ == "__main__":
    main()
