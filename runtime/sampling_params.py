"""How the next token of one request is chosen. Plain data: it travels from the HTTP process to the engine's."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Validated at the edge (`frontend.InputProcessor`) against the model's limits; the engine trusts it.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `logprobs` asks for the chosen token's log probability
    and that many alternatives (0: the chosen one alone; None: nothing); `prompt_logprobs` the same for prompt tokens
    from position `prompt_logprobs_start` on (position 0 has none: nothing precedes it).
    Log probabilities are of the model's own distribution, before temperature, penalties and truncation.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int = 16  # 0 is allowed with prompt_logprobs: score the prompt, generate nothing
    min_tokens: int = 0  # end tokens are masked until then
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 1
    grammar: str | None = None  # that the output follows, as `frontend.grammar` writes it; it decides when it may end
    isolate_grammar: bool = False  # a caller wrote it: following it may take any time, so a process of its own does
