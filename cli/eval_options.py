"""What is asked of `llmq eval`, and whether it goes together: all that can be said before anything is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmq.cli.engine_options import check_device, check_word
from llmq.cli.served_target import is_url
from llmq.profiles.errors import InputError

if TYPE_CHECKING:
    from llmq.evals.numerics import Numerics


@dataclass(frozen=True)
class EvalOptions:
    """The options that bear on one another, as given."""

    model: str
    ppl: str | None
    window: int | None
    stride: int | None
    baseline: str | None
    max_drop: float | None
    tasks: str | None
    data: Path | None
    data_dir: Path | None
    num_fewshot: int | None
    apply_chat_template: bool
    on_overlength: str | None
    tokenizer: Path | None
    numerics: "Numerics"

    @property
    def is_remote(self) -> bool:
        return is_url(self.model)

    @property
    def saved_baseline(self) -> Path | None:
        return Path(self.baseline) if self.baseline and self.baseline.endswith(".json") else None

    @property
    def baseline_model(self) -> str | None:
        return None if self.saved_baseline else self.baseline

    @property
    def wants_tasks(self) -> bool:
        return bool(self.tasks or self.data)

    @property
    def wants_text(self) -> bool:
        """A text that was asked for; of two models also one that was not, and of one that has nothing else to do."""
        return bool(self.ppl or (self.baseline_model and not self.is_remote) or not self.wants_tasks)

    def check(self) -> None:
        """Raises InputError for options that contradict one another, or would have no effect."""
        self._check_served()
        if not self.wants_tasks and (self.num_fewshot is not None or self.apply_chat_template or self.on_overlength):
            raise InputError(
                "--num-fewshot, --apply-chat-template and --on-overlength are about tasks: give --tasks or --data with "
                "them"
            )
        if self.data_dir and not self.tasks:
            raise InputError(f"--data-dir {self.data_dir} holds the data of lm-eval's tasks: name them with --tasks")
        if not self.wants_text and (self.window is not None or self.stride is not None):
            raise InputError("--window and --stride are about a text: give --ppl with them")
        if self.baseline and is_url(self.baseline):
            raise InputError(f"--baseline {self.baseline}: evaluate it by itself with -o, and give its RESULT.json")
        if self.max_drop is not None and not (self.wants_tasks and self.baseline):
            raise InputError("--max-drop is about items that two models answer: give --baseline and --tasks or --data")
        if self.saved_baseline and not self.wants_tasks:
            raise InputError(
                f"--baseline {self.saved_baseline} is a saved result, whose items are compared: give --tasks or --data"
            )

    def _check_served(self) -> None:
        from llmq.evals.numerics import Numerics

        if not self.is_remote:
            if self.tokenizer:
                raise InputError(
                    f"--tokenizer {self.tokenizer} is for the URL of a server: {self.model} brings its own"
                )
            return
        if self.numerics != Numerics():
            raise InputError(
                f"{self.model} computes as it was started: leave --dtype, --kv-dtype, --device, --kernels, … away"
            )
        if self.baseline_model and self.wants_text:
            raise InputError(
                f"{self.model}: divergence from --baseline compares whole distributions, which a server does not give. "
                "Leave --baseline away for the perplexity of the text, or evaluate the folder that is served"
            )


def numerics_of(
    *,
    dtype: str,
    kv_dtype: str,
    device: str,
    threads: int | None,
    batch_invariant: bool,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    **words: str,
) -> "Numerics":
    """`words`: kernels, head, activations. Raises InputError for a value that none of them has."""
    from llmq.evals.numerics import Numerics
    from llmq.runtime.dtypes import parse_dtype

    check_device(device)
    for name, word in words.items():
        check_word(f"--{name}", word)
    return Numerics(
        dtype=parse_dtype("--dtype", dtype),
        kv_dtype=parse_dtype("--kv-dtype", kv_dtype),
        device=device,
        threads=threads,
        batch_invariant=batch_invariant,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        **words,
    )
