"""A user's own set as an lm-eval task, so that few-shot, chat template and filters are lm-eval's own."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from llmq.evals.matching import MATCHES
from llmq.evals.own_set import DEFAULT_MATCH, OwnSet
from llmq.profiles.errors import InputError

MAX_GEN_TOKENS = 128

Doc = dict[str, Any]


def as_lm_eval_task(own_set: OwnSet, max_gen_tokens: int = MAX_GEN_TOKENS) -> ConfigurableTask:
    """Few-shot examples come from the set's other items."""
    return _MAKERS[own_set.kind](own_set, max_gen_tokens)


def check_options(
    own_set: OwnSet, *, num_fewshot: int | None, apply_chat_template: bool, max_drop: float | None = None
) -> None:
    """Raises InputError for what this kind of set has no use for, and for what it cannot do without."""
    if own_set.kind == "conversation":
        if not apply_chat_template:
            raise InputError(
                f"{own_set.name} holds conversations: give --apply-chat-template, by which a model reads them"
            )
        if num_fewshot:
            raise InputError(f"{own_set.name} holds conversations, with their own examples: leave --num-fewshot away")
    if own_set.kind == "text":
        if num_fewshot or apply_chat_template:
            raise InputError(f"{own_set.name} holds texts: --num-fewshot and --apply-chat-template are about prompts")
        if max_drop is not None:
            raise InputError(
                f"{own_set.name} holds texts, which have no right answer that --max-drop could count: leave it away"
            )


class _Generation(ConfigurableTask):
    """Each item under its own stop texts and limit."""

    def construct_requests(self, doc: Doc, ctx: str, **kwargs: Any) -> Instance:
        request = super().construct_requests(doc, ctx, **kwargs)
        context, options = request.arguments
        options = deepcopy(options)
        if doc["stop"] is not None:
            options["until"] = list(doc["stop"])
        if doc["max_tokens"] is not None:
            options["max_gen_toks"] = doc["max_tokens"]
        request.arguments = (context, options)
        return request


class _Conversation(_Generation):
    """The turns of an item are the prompt."""

    def fewshot_context(self, doc: Doc, num_fewshot: int, *, chat_template: Callable[..., str], **_: Any) -> str:
        return chat_template([dict(message) for message in doc["messages"]])


def _config(own_set: OwnSet, prompt: str, **changes: Any) -> dict[str, Any]:
    return {
        "task": own_set.name,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(own_set.items)},
        "test_split": "test",
        "fewshot_split": "test",
        "doc_to_text": prompt,
        "target_delimiter": " ",
        "metadata": {"version": 1},
        **changes,
    }


def _metrics(*names: str) -> list[dict[str, Any]]:
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]


def _multiple_choice(own_set: OwnSet, max_gen_tokens: int) -> ConfigurableTask:
    return ConfigurableTask(
        config=_config(
            own_set,
            "prompt",
            output_type="multiple_choice",
            doc_to_choice="choices",
            doc_to_target="gold",
            metric_list=_metrics("acc", "acc_norm"),
        )
    )


def _generation(own_set: OwnSet, max_gen_tokens: int) -> ConfigurableTask:
    exact = [item["match"] == DEFAULT_MATCH for item in own_set.items]
    is_conversation = own_set.kind == "conversation"
    one_line = not is_conversation and all(exact) and not any("\n" in one["answer"].strip() for one in own_set.items)
    metric = "exact_match" if all(exact) else "match"

    def process_results(doc: Doc, results: list[str]) -> dict[str, float]:
        return {metric: float(MATCHES[doc["match"]](results[0], doc["answer"]))}

    config = _config(
        own_set,
        "" if is_conversation else "prompt",
        output_type="generate_until",
        doc_to_target="answer",
        process_results=process_results,
        generation_kwargs={
            "until": ["\n"] if one_line else [],
            "max_gen_toks": max_gen_tokens,
            "do_sample": False,
        },
        metric_list=_metrics(metric),
    )
    return (_Conversation if is_conversation else _Generation)(config=config)


def _text(own_set: OwnSet, max_gen_tokens: int) -> ConfigurableTask:
    """Perplexities over all texts together as lm-eval has them; of a single text the mean log-likelihood of a byte."""

    def process_results(doc: Doc, results: list[float]) -> dict[str, Any]:
        (log_likelihood,) = results
        num_words, num_bytes = len(doc["text"].split()), len(doc["text"].encode())
        return {
            "word_perplexity": (log_likelihood, num_words),
            "byte_perplexity": (log_likelihood, num_bytes),
            "bits_per_byte": (log_likelihood, num_bytes),
            "log_likelihood_per_byte": log_likelihood / num_bytes,
        }

    perplexities = [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")]
    return ConfigurableTask(
        config=_config(
            own_set,
            "",
            output_type="loglikelihood_rolling",
            doc_to_target="text",
            process_results=process_results,
            metric_list=[*perplexities, *_metrics("log_likelihood_per_byte")],
        )
    )


_MAKERS: dict[str, Callable[[OwnSet, int], ConfigurableTask]] = {
    "multiple_choice": _multiple_choice,
    "generation": _generation,
    "conversation": _generation,
    "text": _text,
}
