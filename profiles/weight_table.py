"""The weights of decoders that only the planner knows, as rows: what `families` says of those that the runtime runs."""

from dataclasses import dataclass, replace
from typing import Literal

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.layer_patterns import ONE, Config, Field, field
from llmq.profiles.linear_shape import Experts, LinearShape, UnknownWeightsError
from llmq.profiles.weight_nemotron import NemotronHRow

_NO = Field((), 0)
_HIDDEN_EXPERT = field("moe_intermediate_size")
_DENSE = field("intermediate_size")
_PER_TOKEN = field("num_experts_per_tok", "num_experts_per_token")


@dataclass(frozen=True)
class WeightRow:
    """Attention and MLP of a decoder: `norms` of them a layer and a final one, of `norm_numbers` (2: with a bias) for
    each hidden feature; a `gated` MLP or one of two linears.

    attention: q, k and v of heads, or multi-head latent attention, with an indexer beside it where `indexer`.
    gated_query: q brings a gate of its own size. delta: layers with a state are gated delta nets. sinks: a number for
    each head that attention sees as one more key. experts: in each `sparse_step`-th layer but the first `dense`, other
    layers having an MLP of `dense_width`; 0: none. per_token: experts that a token is sent to. shared: experts that
    every token passes, as one MLP of so many times the width of one; or of `shared_width`, with a gate of one number
    where `shared_gate`. router_bias: a number for each expert that its score gets. head_bias: of the head.
    layer_numbers: of each layer, that are in none of these.
    """

    attention: Literal["heads", "latent"] = "heads"
    qkv_bias: Field = _NO
    o_bias: Field = _NO
    qk_norm: Literal["head", "projection"] | None = None
    qk_norm_switch: Field = ONE
    indexer: bool = False
    sinks: bool = False
    dense: Field = _NO
    dense_width: Field = _DENSE
    sparse_step: Field = ONE
    experts: Field = _NO
    per_token: Field = _PER_TOKEN
    expert_width: Field = _HIDDEN_EXPERT
    shared: Field = _NO
    shared_width: Field = _NO
    shared_gate: bool = True
    router_bias: bool = False
    expert_bias: bool = False
    norms: int = 2
    norm_numbers: int = 1
    gated: bool = True
    mlp_bias: Field = _NO
    head_bias: Field = _NO
    gated_query: bool = False
    delta: bool = False
    layer_numbers: int = 0

    def linears(self, arch: ModelArchitecture, config: Config) -> list[LinearShape]:
        _require_regular(config)
        layers, hidden = arch.num_layers, arch.hidden_size
        made = (_latent_linears if self.attention == "latent" else self._head_linears)(arch, config)
        if self.indexer:
            number = sum(layer.index_bytes > 0 for layer in arch.keys)
            heads, width = field("index_n_heads").number(config), field("index_head_dim").number(config)
            made.append(
                LinearShape("self_attn.indexer.wq_b", heads * width, field("q_lora_rank").number(config), number)
            )
            made.append(LinearShape("self_attn.indexer.wk", width, hidden, number))
            made.append(LinearShape("self_attn.indexer.weights_proj", heads, hidden, number))
        if self.delta:
            made += _delta_linears(arch, config)
        sparse = self._sparse_layers(arch, config)
        if dense := layers - sparse:
            made += self._mlp("mlp.", self.dense_width.number(config), hidden, dense, bool(self.mlp_bias.of(config)))
        if sparse:
            width, count = self.expert_width.number(config), sparse * self.experts.number(config)
            experts = self._mlp("mlp.experts.", width, hidden, count, self.expert_bias)
            made += [replace(one, is_expert=True) for one in experts]
            if shared := self.shared_width.of(config) or width * (self.shared.of(config) or 0):
                made += self._mlp("mlp.shared_experts.", shared, hidden, sparse)
        return made

    def others(self, arch: ModelArchitecture, config: Config) -> int:
        """Parameters of embedding, head (unless tied), norms, routers and biases."""
        layers, hidden = arch.num_layers, arch.hidden_size
        embeddings = arch.vocab_size * hidden * (1 if arch.tie_word_embeddings else 2)
        norms = (self.norms * layers + 1) * hidden * self.norm_numbers
        norms += len(arch.keys) * self._attention_norms(arch, config) + layers * self.layer_numbers
        if self.delta:
            norms += len(arch.states) * _delta_numbers(config)
        if self.indexer:  # a LayerNorm: weight and bias
            norms += 2 * field("index_head_dim").number(config) * sum(layer.index_bytes > 0 for layer in arch.keys)
        experts, sparse = self.experts.of(config) or 0, self._sparse_layers(arch, config)
        is_gated = self.shared_gate and self.shared_width.of(config)
        routers = sparse * (experts * (hidden + self.router_bias) + hidden * bool(is_gated))
        biases = sum(linear.out_features * linear.count for linear in self.linears(arch, config) if linear.bias)
        biases += bool(self.head_bias.of(config)) * arch.vocab_size
        return embeddings + norms + routers + biases + layers * arch.num_attention_heads * self.sinks

    def experts_of(self, config: Config) -> Experts | None:
        count = self.experts.of(config)
        return Experts(count, self.per_token.number(config)) if count else None

    def _sparse_layers(self, arch: ModelArchitecture, config: Config) -> int:
        if not self.experts.of(config):
            return 0
        return max(0, arch.num_layers - (self.dense.of(config) or 0)) // self.sparse_step.number(config)

    def _head_linears(self, arch: ModelArchitecture, config: Config) -> list[LinearShape]:
        layers, hidden = len(arch.keys), arch.hidden_size
        query, keys = arch.num_attention_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        bias = bool(self.qkv_bias.of(config))
        rows = {"q_proj": query * (1 + self.gated_query), "k_proj": keys, "v_proj": keys}
        made = [LinearShape(f"self_attn.{name}", number, hidden, layers, bias) for name, number in rows.items()]
        return [*made, LinearShape("self_attn.o_proj", hidden, query, layers, bool(self.o_bias.of(config)))]

    def _attention_norms(self, arch: ModelArchitecture, config: Config) -> int:
        if self.attention == "latent":
            return field("kv_lora_rank").number(config) + (config.get("q_lora_rank") or 0)
        kind = self.qk_norm if self.qk_norm_switch.of(config) else None
        heads = {None: 0, "head": 2, "projection": arch.num_attention_heads + arch.num_kv_heads}[kind]
        return heads * arch.head_dim * self.norm_numbers

    def _mlp(self, name: str, width: int, hidden: int, count: int, bias: bool = False) -> list[LinearShape]:
        inputs = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        made = [LinearShape(f"{name}{one}", width, hidden, count, bias) for one in inputs]
        return [*made, LinearShape(f"{name}down_proj", hidden, width, count, bias)]


# Ways to say that experts are in other layers than all but the first few, and what says nothing.
_IRREGULAR = {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_layer_freq": 1}


def _require_regular(config: Config) -> None:
    for key, regular in _IRREGULAR.items():
        if config.get(key) not in (None, regular):
            raise UnknownWeightsError(
                f"config.json: which layers have experts is not known with {key} {config[key]!r}; "
                "say how many bytes the weights take: --weights 40GiB"
            )


def _latent_linears(arch: ModelArchitecture, config: Config) -> list[LinearShape]:
    """Multi-head latent attention: q (by a latent where q_lora_rank is there), the latent, its K and V."""
    layers, hidden, heads = arch.num_layers, arch.hidden_size, arch.num_attention_heads
    nope, rope = field("qk_nope_head_dim").number(config), field("qk_rope_head_dim").number(config)
    value, latent = field("v_head_dim").number(config), field("kv_lora_rank").number(config)
    bias, q_rank = bool(config.get("attention_bias")), config.get("q_lora_rank")
    query = heads * (nope + rope)
    made = [LinearShape("self_attn.q_proj", query, hidden, layers)]
    if q_rank:
        made = [
            LinearShape("self_attn.q_a_proj", q_rank, hidden, layers, bias),
            LinearShape("self_attn.q_b_proj", query, q_rank, layers),
        ]
    return [
        *made,
        LinearShape("self_attn.kv_a_proj_with_mqa", latent + rope, hidden, layers, bias),
        LinearShape("self_attn.kv_b_proj", heads * (nope + value), latent, layers),
        LinearShape("self_attn.o_proj", hidden, heads * value, layers, bias),
    ]


def _delta_sizes(config: Config) -> tuple[int, int, int, int]:
    """Of a gated delta net: features of all keys, of all values, heads of values, features of one."""
    heads, width = field("linear_num_value_heads").number(config), field("linear_value_head_dim").number(config)
    keys = field("linear_num_key_heads").number(config) * field("linear_key_head_dim").number(config)
    return keys, heads * width, heads, width


def _delta_linears(arch: ModelArchitecture, config: Config) -> list[LinearShape]:
    """q, k, v and the output's gate; decay and write strength of each head; the output."""
    keys, values, heads, _ = _delta_sizes(config)
    hidden, layers = arch.hidden_size, len(arch.states)
    return [
        LinearShape("linear_attn.in_proj_qkvz", 2 * keys + 2 * values, hidden, layers),
        LinearShape("linear_attn.in_proj_ba", 2 * heads, hidden, layers),
        LinearShape("linear_attn.out_proj", hidden, values, layers),
    ]


def _delta_numbers(config: Config) -> int:
    """The short convolution over q, k and v, two numbers a head, and the norm of the output."""
    keys, values, heads, width = _delta_sizes(config)
    return (2 * keys + values) * field("linear_conv_kernel_dim").number(config) + 2 * heads + width


_DEEPSEEK = {
    "attention": "latent",
    "dense": field("first_k_dense_replace", default=0),
    "experts": field("n_routed_experts"),
    "shared": field("n_shared_experts"),
}
_ATTENTION_BIAS = field("attention_bias", default=False)
_BIAS = field("bias", default=False)
_QK = field("use_qk_norm", default=False)

# Multi-token-prediction layers, which no engine needs to serve, are not counted.
WEIGHT_ROWS: dict[str, WeightRow | NemotronHRow] = {
    "deepseek_v2": WeightRow(**_DEEPSEEK),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "glm4_moe_lite"), WeightRow(**_DEEPSEEK, router_bias=True)),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), WeightRow(**_DEEPSEEK, router_bias=True, indexer=True)),
    "nemotron_h": NemotronHRow(),
    "glm4_moe": WeightRow(
        qkv_bias=_ATTENTION_BIAS,
        dense=field("first_k_dense_replace", default=1),
        experts=field("n_routed_experts"),
        shared=field("n_shared_experts", default=1),
        router_bias=True,
        qk_norm="head",
        qk_norm_switch=_QK,
    ),
    "minimax_m2": WeightRow(
        qk_norm="projection",
        experts=field("num_local_experts"),
        expert_width=field("intermediate_size"),
        router_bias=True,
    ),
    "dots1": WeightRow(
        **{**_DEEPSEEK, "attention": "heads"}, qkv_bias=_ATTENTION_BIAS, qk_norm="head", router_bias=True
    ),
    **dict.fromkeys(("ministral", "ministral3"), WeightRow()),
    "olmo3": WeightRow(qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, qk_norm="projection"),
    "olmoe": WeightRow(
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        qk_norm="projection",
        experts=field("num_experts"),
        expert_width=field("intermediate_size"),
    ),
    "granitemoe": WeightRow(
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        experts=field("num_local_experts"),
        expert_width=field("intermediate_size"),
    ),
    "qwen2_moe": WeightRow(
        qkv_bias=field("qkv_bias", default=True),
        experts=field("num_experts"),
        shared_width=field("shared_expert_intermediate_size"),
    ),
    "gpt_oss": WeightRow(
        qkv_bias=field("attention_bias", default=True),
        o_bias=field("attention_bias", default=True),
        sinks=True,
        experts=field("num_local_experts"),
        expert_width=field("intermediate_size"),
        expert_bias=True,
        router_bias=True,
    ),
    "llama4_text": WeightRow(
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        dense_width=field("intermediate_size_mlp"),
        sparse_step=field("interleave_moe_layer_step", default=1),
        experts=field("num_local_experts"),
        expert_width=field("intermediate_size"),
        shared=ONE,
    ),
    **dict.fromkeys(("gemma", "helium", "ernie4_5"), WeightRow(qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS)),
    **dict.fromkeys(("baichuan", "xverse"), WeightRow()),
    **dict.fromkeys(("internlm", "internlm2"), WeightRow(qkv_bias=_BIAS, o_bias=_BIAS)),
    "mimo": WeightRow(qkv_bias=_ATTENTION_BIAS),
    "orion": WeightRow(norm_numbers=2),
    "deepseek": WeightRow(**{**_DEEPSEEK, "attention": "heads"}, qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), WeightRow(qkv_bias=ONE)),
    "qwen3_vl_text": WeightRow(qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, qk_norm="head"),
    "qwen3_vl_moe_text": WeightRow(
        qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, qk_norm="head", experts=field("num_experts")
    ),
    **dict.fromkeys(
        ("cohere", "cohere2"),
        WeightRow(qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, norms=1, qk_norm="projection", qk_norm_switch=_QK),
    ),
    "glm": WeightRow(qkv_bias=field("attention_bias", default=True)),
    "glm4": WeightRow(qkv_bias=field("attention_bias", default=True), norms=4),
    "arcee": WeightRow(
        qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, mlp_bias=field("mlp_bias", default=False), gated=False
    ),
    "nemotron": WeightRow(
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        mlp_bias=field("mlp_bias", default=False),
        gated=False,
        norm_numbers=2,
    ),
    "apertus": WeightRow(
        qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, qk_norm="head", gated=False, layer_numbers=2
    ),
    "stablelm": WeightRow(qkv_bias=field("use_qkv_bias", default=False), norm_numbers=2),
    "olmo": WeightRow(qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, norm_numbers=0),
    "phi": WeightRow(qkv_bias=ONE, o_bias=ONE, mlp_bias=ONE, gated=False, norms=1, norm_numbers=2, head_bias=ONE),
    "gpt_neox": WeightRow(
        qkv_bias=field("attention_bias", default=True),
        o_bias=field("attention_bias", default=True),
        mlp_bias=ONE,
        gated=False,
        norm_numbers=2,
    ),
    "hunyuan_v1_dense": WeightRow(qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, qk_norm="head"),
    "phimoe": WeightRow(
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        experts=field("num_local_experts"),
        expert_width=field("intermediate_size"),
        norm_numbers=2,
        head_bias=field("lm_head_bias", default=False),
    ),
    "granitemoeshared": WeightRow(
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        experts=field("num_local_experts"),
        expert_width=field("intermediate_size"),
        shared_width=field("shared_intermediate_size"),
        shared_gate=False,
    ),
    "qwen3_next": WeightRow(
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        qk_norm="head",
        gated_query=True,
        delta=True,
        experts=field("num_experts"),
        shared_width=field("shared_expert_intermediate_size"),
    ),
    "qwen3_5_text": WeightRow(
        qkv_bias=_ATTENTION_BIAS, o_bias=_ATTENTION_BIAS, qk_norm="head", gated_query=True, delta=True
    ),
    "qwen3_5_moe_text": WeightRow(
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        qk_norm="head",
        gated_query=True,
        delta=True,
        experts=field("num_experts"),
        shared_width=field("shared_expert_intermediate_size"),
    ),
    "seed_oss": WeightRow(qkv_bias=_ATTENTION_BIAS, o_bias=field("attention_out_bias", default=False)),
}
