"""What happened to the items of a run, so that nothing is silent."""

from dataclasses import asdict, dataclass


@dataclass
class HarnessCounts:
    num_likelihoods: int = 0
    num_generations: int = 0
    num_truncated: int = 0  # contexts cut from the left to fit the model
    num_left_out: int = 0  # requests of items that are longer than the model, where --on-overlength is skip
    num_encoded_apart: int = 0  # continuations encoded alone: joined to the context they left no token of their own
    num_unequal_joins: int = (
        0  # context and continuation share a token when encoded jointly: it is scored as lm-eval does
    )
    num_hit_cap: int = 0  # generations that ended at max_gen_toks
    num_empty: int = 0  # generations without text
    num_system_dropped: int = 0  # conversations whose system turn the chat template refuses

    def to_dict(self) -> dict[str, int]:
        return asdict(self)
