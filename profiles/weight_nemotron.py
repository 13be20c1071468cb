"""The weights of Nemotron-H: each layer is one thing, a Mamba-2 mixer, attention, an MLP or a mixture of experts."""

from dataclasses import dataclass

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.layer_patterns import Config, field
from llmq.profiles.linear_shape import Experts, LinearShape

_LETTERS = {"mlp": "-", "moe": "E", "mamba": "M", "attention": "*"}
_STATE = field("ssm_state_size")
_EXPERTS = field("n_routed_experts")


@dataclass(frozen=True)
class NemotronHRow:
    """MLPs of two linears (squared ReLU). Experts may work on a latent: `moe_latent_size`, with a linear to and fro."""

    def linears(self, arch: ModelArchitecture, config: Config) -> list[LinearShape]:
        hidden, mixers, attention = arch.hidden_size, len(arch.states), len(arch.keys)
        inner, convolved, heads = _mamba_sizes(config)
        query, keys = arch.num_attention_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        made = [
            LinearShape("mixer.in_proj", inner + convolved + heads, hidden, mixers),
            LinearShape("mixer.out_proj", hidden, inner, mixers),
            LinearShape("mixer.q_proj", query, hidden, attention),
            LinearShape("mixer.k_proj", keys, hidden, attention),
            LinearShape("mixer.v_proj", keys, hidden, attention),
            LinearShape("mixer.o_proj", hidden, query, attention),
        ]
        if dense := _layers(config, "mlp"):
            made += _mlp("mixer.", field("intermediate_size").number(config), hidden, dense)
        if sparse := _layers(config, "moe"):
            latent, count = config.get("moe_latent_size") or hidden, sparse * _EXPERTS.number(config)
            width = field("moe_intermediate_size").number(config)
            made += _mlp("mixer.experts.", width, latent, count, is_expert=True)
            shared = field("moe_shared_expert_intermediate_size").number(config)
            made += _mlp("mixer.shared_experts.", shared, hidden, sparse * (config.get("n_shared_experts") or 0))
            if latent != hidden:
                made.append(LinearShape("mixer.fc1_latent_proj", latent, hidden, sparse))
                made.append(LinearShape("mixer.fc2_latent_proj", hidden, latent, sparse))
        return [one for one in made if one.count]

    def others(self, arch: ModelArchitecture, config: Config) -> int:
        """Parameters of embedding, head, norms, routers and what a Mamba-2 mixer has beside its linears."""
        hidden = arch.hidden_size
        embeddings = arch.vocab_size * hidden * (1 if arch.tie_word_embeddings else 2)
        inner, convolved, heads = _mamba_sizes(config)
        kernel = field("conv_kernel").number(config) + bool(config.get("use_conv_bias", True))
        mixers = len(arch.states) * (convolved * kernel + 3 * heads + inner)
        sparse = _layers(config, "moe")
        routers = sparse * _EXPERTS.number(config) * (hidden + 1) if sparse else 0
        return embeddings + (arch.num_layers + 1) * hidden + mixers + routers

    def experts_of(self, config: Config) -> Experts | None:
        if not _layers(config, "moe"):
            return None
        return Experts(_EXPERTS.number(config), field("num_experts_per_tok").number(config))


def _layers(config: Config, kind: str) -> int:
    """How many layers are of this kind; what follows the decoder's own layers is not counted."""
    words = config.get("layers_block_type") or list(config.get("hybrid_override_pattern") or "")
    words = words[: config.get("num_hidden_layers") or len(words)]
    return sum(word in (kind, _LETTERS[kind]) for word in words)


def _mamba_sizes(config: Config) -> tuple[int, int, int]:
    """Features of the mixer, features that the short convolution covers (with B and C of each group), heads."""
    heads = field("mamba_num_heads").number(config)
    inner = heads * field("mamba_head_dim").number(config)
    return inner, inner + 2 * field("n_groups").number(config) * _STATE.number(config), heads


def _mlp(name: str, width: int, hidden: int, count: int, *, is_expert: bool = False) -> list[LinearShape]:
    return [
        LinearShape(f"{name}up_proj", width, hidden, count, is_expert=is_expert),
        LinearShape(f"{name}down_proj", hidden, width, count, is_expert=is_expert),
    ]
