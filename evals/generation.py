"""An lm-eval generation item's options as SamplingParams and stop strings: each request its own, none dropped."""

from dataclasses import dataclass
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from llmq.profiles.errors import InputError
from llmq.runtime.frontend.input_processor import InputProcessor
from llmq.runtime.sampling_params import SamplingParams

DEFAULT_MAX_GEN_TOKENS = 256  # lm-eval's
_HONOURED = ("top_p", "top_k", "min_p", "repetition_penalty", "seed", "min_tokens")


@dataclass(frozen=True)
class Generation:
    prompt_token_ids: list[int]  # cut from the left where prompt and output did not fit together
    num_cut: int  # tokens
    params: SamplingParams
    stop: list[str]


def generation_request(prompt: list[int], options: dict[str, Any], edge: InputProcessor, max_length: int) -> Generation:
    """Raises InputError on an option that llmq does not honour, InvalidRequestError on a value out of range."""
    kwargs = dict(normalize_gen_kwargs(options, DEFAULT_MAX_GEN_TOKENS))
    max_tokens = kwargs.pop("max_gen_toks")
    do_sample = kwargs.pop("do_sample")
    temperature = kwargs.pop("temperature", 1.0 if do_sample else 0.0)
    stop, stop_token_ids = _split_stops(kwargs.pop("until"), edge)
    fields = {name: kwargs.pop(name) for name in _HONOURED if name in kwargs}
    if kwargs.get("num_beams") == 1:
        del kwargs["num_beams"]
    if kwargs:
        raise InputError(
            f"generation option(s) not honoured by llmq: {', '.join(f'{k}={v!r}' for k, v in kwargs.items())}"
        )
    room = max_length - max_tokens
    if room < 1:
        raise InputError(f"max_gen_toks {max_tokens} leaves no room for a prompt in this model's {max_length} tokens")
    num_cut = max(0, len(prompt) - room)
    prompt = prompt[num_cut:]
    params = edge.sampling_params(
        len(prompt), max_tokens=max_tokens, temperature=temperature, stop_token_ids=stop_token_ids, **fields
    )
    return Generation(prompt, num_cut, params, stop)


def _split_stops(until: list[str], edge: InputProcessor) -> tuple[list[str], frozenset[int]]:
    """A stop string that is a special token's name is a stop token: special tokens never show in the text."""
    strings: list[str] = []
    token_ids: set[int] = set()
    for text in until:
        ids = edge.tokenizer.encode(text, add_special_tokens=False) if text else []
        if len(ids) == 1 and ids[0] in edge.tokenizer.special_token_ids:
            token_ids.add(ids[0])
        elif text:
            strings.append(text)
    return strings, frozenset(token_ids)
