"""Perplexity of a text, scored through the Engine that serves.

Convention: the one of the WikiText-2 numbers in the quantization literature (GPTQ, AWQ, SmoothQuant): the whole text is
encoded once, cut into windows side by side (2048 tokens unless told otherwise), each window goes through the model on
its own, and the first token of each window is not scored because nothing stands before it. The papers drop the last,
shorter window; here it is scored too, and the papers' number is given beside it as `token_ppl_full_windows`. A smaller
stride gives every token at least window - stride tokens of context and scores each exactly once.
A tokenizer that puts a BOS before a text gets one before every window, as context.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from llmq.evals.stepping import EngineLike, RequestStream
from llmq.evals.windows import WindowPlan
from llmq.profiles.errors import InputError
from llmq.profiles.progress import Progress, silent
from llmq.runtime.request import EngineRequest
from llmq.runtime.sampling_params import SamplingParams

DEFINITIONS = {
    "token_ppl": "exp of the mean negative log-likelihood (NLL) over the scored tokens",
    "token_ppl_full_windows": "the same without the last, shorter window: what papers print",
    "word_ppl": "exp(mean NLL × tokens / words), words split at white space",
    "bits_per_byte": "mean NLL / ln 2 × tokens / UTF-8 bytes",
}


@dataclass(frozen=True)
class TextCounts:
    """Size of the text that a plan covers. Word and byte measures spread the mean NLL of a token over them."""

    num_tokens: int
    num_words: int
    num_bytes: int

    @classmethod
    def of(cls, text: str, num_tokens: int) -> "TextCounts":
        return cls(num_tokens, num_words=len(text.split()), num_bytes=len(text.encode()))


@dataclass(frozen=True)
class Perplexity:
    token_ppl: float
    token_ppl_full_windows: float | None  # None: no full window, or windows that overlap
    word_ppl: float
    bits_per_byte: float
    mean_nll: float  # nats per scored token
    num_tokens: int
    num_scored: int
    num_unscored: int
    num_words: int
    num_bytes: int
    window: int
    stride: int
    num_windows: int
    elapsed_s: float

    def to_dict(self) -> dict:
        return asdict(self)


def evaluate_perplexity(
    engine: EngineLike,
    token_ids: list[int],
    plan: WindowPlan,
    counts: TextCounts,
    progress: Progress = silent,
) -> Perplexity:
    """Scores the planned windows of `token_ids` by prompt log probabilities.

    Raises InputError when a window does not fit the engine's `max_model_len`.
    """
    check_window_fits(plan, engine)
    started_s = time.perf_counter()
    window_nll = [0.0] * len(plan.windows)
    done = 0
    for output in RequestStream(engine, scoring_requests(token_ids, plan)):
        if output.prompt_logprobs is None:
            continue
        index = int(output.request_id.removeprefix("window-"))
        window_nll[index] = -math.fsum(entry.logprob for entry in output.prompt_logprobs)
        done += plan.windows[index].num_scored
        progress("perplexity", done, plan.num_scored, unit="tokens")
    if done != plan.num_scored:
        raise RuntimeError(f"the engine scored {done} tokens of {plan.num_scored}")
    return summarize(window_nll, plan, counts, time.perf_counter() - started_s)


def scoring_requests(token_ids: list[int], plan: WindowPlan) -> Iterator[EngineRequest]:
    """One request a window, named `window-<index>`, that asks for the log probabilities of its scored tokens."""
    for index in range(len(plan.windows)):
        params = SamplingParams(
            temperature=0.0, max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=plan.prompt_start(index)
        )
        yield EngineRequest(
            request_id=f"window-{index}", prompt_token_ids=plan.prompt(index, token_ids), sampling_params=params
        )


def check_window_fits(plan: WindowPlan, engine: EngineLike) -> None:
    longest = max(len(plan.prefix) + window.end - window.begin for window in plan.windows)
    if longest > engine.info.max_model_len:
        raise InputError(
            f"a window of {longest} tokens does not fit the {engine.info.max_model_len} tokens this engine holds "
            f"for one request: use --window {engine.info.max_model_len} or less"
        )


def summarize(window_nll: list[float], plan: WindowPlan, counts: TextCounts, elapsed_s: float) -> Perplexity:
    """The measures from each window's summed NLL (nats)."""
    mean_nll = math.fsum(window_nll) / plan.num_scored
    return Perplexity(
        token_ppl=_exp(mean_nll),
        token_ppl_full_windows=_full_windows_ppl(window_nll, plan),
        word_ppl=_exp(mean_nll * counts.num_tokens / counts.num_words) if counts.num_words else math.inf,
        bits_per_byte=mean_nll / math.log(2) * counts.num_tokens / counts.num_bytes,
        mean_nll=mean_nll,
        num_tokens=plan.num_tokens,
        num_scored=plan.num_scored,
        num_unscored=plan.num_unscored,
        num_words=counts.num_words,
        num_bytes=counts.num_bytes,
        window=plan.window,
        stride=plan.stride,
        num_windows=len(plan.windows),
        elapsed_s=elapsed_s,
    )


def _full_windows_ppl(window_nll: list[float], plan: WindowPlan) -> float | None:
    text_window = plan.window - len(plan.prefix)
    full = [i for i, window in enumerate(plan.windows) if window.end - window.begin == text_window]
    if plan.stride != text_window or not full:
        return None
    return _exp(math.fsum(window_nll[i] for i in full) / sum(plan.windows[i].num_scored for i in full))


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
