"""InputProcessor: what a caller wrote, checked against the model's limits, as ids and SamplingParams.

Every refusal happens here, before the engine hears of the request, and names the field, the value and the range.
"""

import json
from collections.abc import Sequence
from typing import Any

from llmq.runtime.frontend.chat_template import Message
from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.request import EngineInfo
from llmq.runtime.sampling_params import SamplingParams

ROLES = ("system", "user", "assistant", "tool")
MAX_LOGPROBS = 20
MAX_N = 128
MAX_SEQUENCES = 1024  # prompts × n of one call
MAX_STOP_STRINGS = 16
DEFAULT_COMPLETION_TOKENS = 16

Prompt = str | Sequence[int]

# Dividing logits by less than this overflows float32 and means the same: the most likely token.
LOWEST_TEMPERATURE = 1e-4

# field: (lowest, highest), both allowed
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "n": (1, MAX_N),
    "best_of": (1, MAX_N),
    "beam_width": (1, 32),
    "length_penalty": (-10, 10),
    "logprobs": (0, MAX_LOGPROBS),
    "top_logprobs": (0, MAX_LOGPROBS),
    "seed": (-(2**63), 2**63 - 1),
    "priority": (-(2**31), 2**31 - 1),
}


def check_range(field: str, value: float | None) -> None:
    """Raises InvalidRequestError unless `value` is None or within the range of `field`."""
    if value is None:
        return
    low, high = _RANGES[field]
    if not low <= value <= high:
        raise InvalidRequestError(f"{field} must be at least {low} and at most {high}, got {value}", param=field)


class InputProcessor:
    """Bound to one model's tokenizer and one engine's limits."""

    def __init__(self, tokenizer: Tokenizer, info: EngineInfo) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = info.max_model_len
        self.vocab_size = info.vocab_size
        # The engine stops at the ids that it read itself; what only the tokenizer knows is sent along.
        self._knows_tools = tokenizer.chat_template is not None and tokenizer.chat_template.knows_tools
        self._more_eos = tokenizer.eos_token_ids - set(info.eos_token_ids)

    def completion_prompts(self, prompt: Any) -> list[list[int]]:
        """`prompt` as the API takes it (text, ids, or a list of either) -> ids of each. Special tokens count."""
        prompts = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
        if not isinstance(prompts, list) or not all(
            isinstance(one, str) or one == [] or _is_ids(one) for one in prompts
        ):
            raise InvalidRequestError("prompt must be a text, a list of token ids, or a list of these", param="prompt")
        if not prompts:
            raise InvalidRequestError("prompt must hold at least one prompt", param="prompt")
        if len(prompts) > MAX_SEQUENCES:
            raise InvalidRequestError(
                f"prompt may hold at most {MAX_SEQUENCES} prompts, got {len(prompts)}", param="prompt"
            )
        return [self._prompt_ids(one, "prompt") for one in prompts]

    def chat_prompt(
        self, messages: Sequence[Message], tools: list[Any] | None = None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Messages through the chat template -> ids. Roles are the known ones: a role is template text, not content."""
        if not messages:
            raise InvalidRequestError("messages must hold at least one message", param="messages")
        for index, message in enumerate(messages):
            if message["role"] not in ROLES:
                raise InvalidRequestError(
                    f"messages[{index}].role must be one of {', '.join(ROLES)}, got {message['role']!r}",
                    param="messages",
                )
            if message["role"] == "tool" and not self._knows_tools:
                raise InvalidRequestError(
                    f"messages[{index}].role: this model's chat template knows no tools", param="messages"
                )
        self._check_length(sum(_num_bytes(message["content"] or "", "messages") for message in messages), "messages")
        if tools is not None:
            self._check_length(_num_bytes(json.dumps(tools, ensure_ascii=False), "tools"), "tools")
        ids = self.tokenizer.encode_chat(list(messages), tools=tools, add_generation_prompt=add_generation_prompt)
        if not ids:
            raise InvalidRequestError("messages: the chat template makes no token of them", param="messages")
        return ids

    def text_ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text that need not be a prompt: it may be empty."""
        self._check_length(_num_bytes(text, "prompt"), "prompt")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """What ids stand for, special tokens shown."""
        self._check_ids(token_ids, "tokens")
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def sampling_params(
        self,
        num_prompt_tokens: int,
        *,
        max_tokens: int | None = None,
        default_max_tokens: int | None = None,
        param: str = "max_tokens",
        prompt_param: str = "prompt",
        **fields: Any,
    ) -> SamplingParams:
        """Check every sampling field (None: not given) and that prompt and output fit the context together.

        A `max_tokens` that was asked for must fit; a default (`default_max_tokens`, or all that is left) is cut to
        what does. 0 is allowed with `prompt_logprobs`. `param` and `prompt_param` are what the caller's API calls the
        two. Raises InvalidRequestError.
        """
        fields = {name: value for name, value in fields.items() if value is not None}
        for name in fields.keys() & _RANGES.keys():
            check_range(name, fields[name])
        lowest = 1 if fields.get("prompt_logprobs") is None else 0
        if max_tokens is not None and max_tokens < lowest:
            raise InvalidRequestError(f"{param} must be at least {lowest}, got {max_tokens}", param=param)
        max_tokens = self._output_tokens(num_prompt_tokens, max_tokens, default_max_tokens, (param, prompt_param))
        self._check_tokens(fields, max_tokens)
        for name in ("ignore_eos", "min_tokens"):
            if fields.get("grammar") is not None and fields.get(name):
                raise InvalidRequestError(f"{name}: not with a structured output, which decides its end", param=name)
        ignore_eos = fields.get("ignore_eos", False)
        stop_token_ids = frozenset(fields.pop("stop_token_ids", ())) | (frozenset() if ignore_eos else self._more_eos)
        if fields.get("temperature", 1) < LOWEST_TEMPERATURE:
            fields["temperature"] = 0.0
        if fields.get("top_k") == -1:
            fields["top_k"] = 0
        if fields.get("top_p") == 0:  # a nucleus of no mass still holds the most likely token
            fields |= {"top_p": 1.0, "top_k": 1}
        return SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids, **fields)

    def stop_strings(self, stop: str | Sequence[str] | None) -> list[str]:
        """`stop` as the API takes it -> a list."""
        strings = [] if stop is None else [stop] if isinstance(stop, str) else list(stop)
        if len(strings) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(strings)}", param="stop"
            )
        if "" in strings:
            raise InvalidRequestError("stop must not hold an empty string", param="stop")
        return strings

    def _prompt_ids(self, prompt: Prompt, param: str) -> list[int]:
        if isinstance(prompt, str):
            self._check_length(_num_bytes(prompt, param), param)
            ids = self.tokenizer.encode(prompt)
        else:
            ids = list(prompt)
            self._check_ids(ids, param)
        if not ids:
            raise InvalidRequestError(
                f"{param} must hold at least one token; this model adds none of its own", param=param
            )
        return ids

    def _check_length(self, num_bytes: int, param: str) -> None:
        """Refuse by size alone what cannot fit, so that a huge text costs no tokenizing."""
        fewest = num_bytes // self.tokenizer.longest_token_bytes
        if fewest > self.max_model_len:
            raise InvalidRequestError(
                f"{param}: this model's maximum context length is {self.max_model_len} tokens, "
                f"and these {num_bytes} bytes of text are at least {fewest}",
                param=param,
                code="context_length_exceeded",
            )

    def _output_tokens(self, num_prompt: int, asked: int | None, default: int | None, params: tuple[str, str]) -> int:
        left = self.max_model_len - num_prompt
        if asked is None:
            asked = max(1, left if default is None else min(left, default))
        if asked <= left:
            return asked
        raise InvalidRequestError(
            f"this model's maximum context length is {self.max_model_len} tokens, but {num_prompt + asked} were "
            f"requested: {num_prompt} in the prompt and {asked} for the output ({params[0]})",
            param=params[0] if left >= 1 else params[1],
            code="context_length_exceeded",
        )

    def _check_tokens(self, fields: dict[str, Any], max_tokens: int) -> None:
        top_k = fields.get("top_k", 0)
        if top_k < -1:
            raise InvalidRequestError(f"top_k must be at least 1, or 0 or -1 for off, got {top_k}", param="top_k")
        min_tokens = fields.get("min_tokens", 0)
        if not 0 <= min_tokens <= max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at least 0 and at most the output's {max_tokens} tokens, got {min_tokens}",
                param="min_tokens",
            )
        self._check_ids(fields.get("stop_token_ids", ()), "stop_token_ids")
        bias = fields.get("logit_bias", {})
        self._check_ids(bias, "logit_bias")
        for token_id, value in bias.items():
            if not -100 <= value <= 100:
                raise InvalidRequestError(
                    f"logit_bias must be at least -100 and at most 100, got {value} for token {token_id}",
                    param="logit_bias",
                )

    def _check_ids(self, ids: Sequence[int] | dict[int, float], param: str) -> None:
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"{param}: {token_id} is not a token id of this model, whose ids are 0 to {self.vocab_size - 1}",
                    param=param,
                )


def _is_ids(prompt: Any) -> bool:
    """A list of whole numbers, not empty. True and False are none, though Python says so."""
    return isinstance(prompt, list) and bool(prompt) and all(type(item) is int for item in prompt)


def _num_bytes(text: str, param: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        raise InvalidRequestError(f"{param} is no valid Unicode text: {error.reason}", param=param) from None
