"""The requests of the OpenAI API as we honour them. A field that is not here is refused by name, never ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

# OpenAI's fields that are not built, with the values that ask for nothing and so do no harm.
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
}


_SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="vLLM's: the counts so far in every chunk.")
    include_obfuscation: Literal[False] = False

    @model_validator(mode="after")
    def _check(self) -> "StreamOptions":
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("stream_options: continuous_usage_stats only with include_usage")
        return self


class JsonSchemaFormat(Strict):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="The schema is followed either way.")


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("response_format: json_schema goes with type json_schema, and only with it")
        return self


class StructuredOutputs(Strict):
    """vLLM's field of this name: exactly one of these."""

    json_: dict[str, Any] | None = Field(None, alias="json", description="A JSON Schema.")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(None, description="GBNF (`root ::= …`) or Lark (`start: …`), up to 1 MiB.")


class GenerationRequest(Strict):
    """What both kinds of request share. None: not given. Ranges are checked against the model by InputProcessor."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = Field(None, description="With use_beam_search. Default: n, at least 2.")
    length_penalty: float | None = Field(
        None, description="Beams score their log probability / tokens ** this. Default: 1."
    )
    priority: int | None = Field(None, description="Lower runs first; 0 where not given. -2147483648 to 2147483647.")
    user: str | None = Field(None, description="Accepted and not used.")

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = {
            name: value
            for name, value in data.items()
            if name not in _NOT_BUILT or not (value is None or value in _NOT_BUILT[name])
        }
        if data.get("best_of") in (None, data.get("n") or 1):
            data.pop("best_of", None)
        return data

    def sampling_fields(self) -> dict[str, Any]:
        """The fields that SamplingParams has under the same names; logit_bias with whole numbers as keys."""
        fields = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        if self.logit_bias is not None:
            fields["logit_bias"] = {int(token_id): value for token_id, value in self.logit_bias.items()}
        return fields

    @model_validator(mode="after")
    def _check_together(self) -> "GenerationRequest":
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("structured_outputs: give response_format or structured_outputs, not both")
        for field in ("beam_width", "length_penalty"):
            if getattr(self, field) is not None and not self.use_beam_search:
                raise ValueError(f"{field}: only with use_beam_search true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream true")
        for token_id in self.logit_bias or ():
            if not token_id.removeprefix("-").isdecimal() or len(token_id) > 20:
                raise ValueError(f"logit_bias: keys must be token ids, got {token_id!r}")
        return self


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1}, "minItems": 1},
    ]
}


class CompletionRequest(GenerationRequest):
    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]  # checked by InputProcessor: it may hold 100,000 ids
    logprobs: int | None = None
    echo: bool | None = None
    prompt_logprobs_start: int | None = Field(
        None,
        description="With echo and logprobs: the first position of a prompt that is scored, at least 1. What stands "
        "before it may come from the prefix cache.",
    )
    return_token_ids: bool | None = Field(None, description="vLLM's: token_ids and prompt_token_ids in each choice.")
    best_of: int | None = Field(None, description="Of so many sequences the n likeliest (by token) are returned.")


def explain(error: ValidationError | Any) -> tuple[str, str | None]:
    """(message, field at fault) of the first thing that pydantic found wrong; `error.errors()` as FastAPI gives it."""
    first = error.errors()[0]
    location = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['ctx']['error']}", None
    if first["type"] == "extra_forbidden":
        return f"{'.'.join(location)}: this field is not supported", location[0]
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        return message, message.split(":", 1)[0]
    if not location:
        return "the body must be a JSON object, sent with content-type application/json", None
    if first["type"] == "missing":
        return f"{'.'.join(location)}: this field is required", location[0]
    return f"{'.'.join(location)}: {first['msg']}", location[0]
