"""Drafters that are right as often as a test wants, and what runs with and without them are compared by."""

import json
import random
import shutil
from collections.abc import Sequence

from engine_driver import Collected

from llmq.runtime.batch import RunnerRequest
from llmq.runtime.config import Speculation
from llmq.runtime.engine import Engine
from llmq.runtime.sampling_params import SamplingParams
from llmq.runtime.scheduler_output import DraftTerms, ScheduledRequest

SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True)


class KnowingDrafter:
    """Guesses what a plain run said, each token right with probability `share`."""

    name = "knowing"
    reads_hidden = "nothing"
    num_pooled = 0

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int, share: float = 1.0) -> None:
        """`texts`: prompt and continuation of every request."""
        self._texts = [list(text) for text in texts]
        self._vocab_size, self._share, self._rng = vocab_size, share, random.Random(0)
        self.num_proposed = 0

    def propose(
        self, items: Sequence[ScheduledRequest], requests: Sequence[RunnerRequest], terms: DraftTerms
    ) -> list[list[int]]:
        pairs = zip(items, requests, strict=True)
        drafts = [self._draft(request.token_ids, item.max_draft_tokens) for item, request in pairs]
        self.num_proposed += sum(map(len, drafts))
        return drafts

    def forget(self, request_id: str) -> None:
        pass

    def _draft(self, token_ids: list[int], count: int) -> list[int]:
        known = next((text for text in self._texts if text[: len(token_ids)] == token_ids), [])
        right = known[len(token_ids) :][:count]
        guesses = [self._rng.randrange(3, self._vocab_size) for _ in range(count)]
        return [a if self._rng.random() < self._share else b for a, b in zip(right, guesses, strict=False)]


def use(engine: Engine, drafter) -> Engine:
    """Have an engine with speculation take another drafter."""
    engine.executor.runner.drafter = drafter
    return engine


def prompts(count: int, longest: int = 30) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 512) for _ in range(rng.randint(2, longest))] for _ in range(count)]


def everything(made: list[Collected]) -> list[tuple]:
    return [(one.token_ids, one.finish_reason, one.error, [e.token_id for e in one.logprobs]) for one in made]


def guided(make_engine, folder, drafter, k: int = 4, *, adaptive: bool = False, **changes):
    speculation = Speculation(method="draft", num_tokens=k, draft_model=str(drafter), adaptive=adaptive)
    return make_engine(folder, speculation=speculation, **changes)


def first_layers(folder, count: int):
    """A copy with the first layers only."""
    from safetensors.torch import load_file, save_file

    made = folder.parent / f"{folder.name}-first-{count}"
    if not made.exists():
        shutil.copytree(folder, made)
        config = json.loads((made / "config.json").read_text())
        config["num_hidden_layers"] = count
        (made / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        kept = {name: t for name, t in tensors.items() if ".layers." not in name or int(name.split(".")[2]) < count}
        save_file(kept, made / "model.safetensors", {"format": "pt"})
    return made
