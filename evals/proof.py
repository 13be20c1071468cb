"""A saved verdict as the condition of serving: the same checkpoint, the same numerics, and a PASS."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmq.evals.result import SCHEMA, identify_checkpoint
from llmq.evals.verdict import Verdict
from llmq.profiles.errors import FailedError, InputError
from llmq.runtime.dtypes import Dtypes
from llmq.runtime.request import EngineInfo

_WHAT = {
    "sha256": "the checkpoint (config.json and weights)",
    "tokenizer_sha256": "tokenizer.json",
    "chat_template_sha256": "the chat template",
}


@dataclass(frozen=True)
class Proof:
    """A result of `llmq eval --baseline … --max-drop … -o` whose verdict is PASS."""

    path: Path
    model: dict[str, Any]  # as `describe_model` gives it

    @classmethod
    def read(cls, path: Path) -> "Proof":
        """Raises InputError for what is no result with a verdict, FailedError for one that is not PASS."""
        try:
            record = json.loads(path.read_bytes())
        except OSError as error:
            raise InputError(f"--proof {path}: {error.strerror or error}") from None
        except ValueError as error:
            raise InputError(f"--proof {path} is not JSON: {error}") from None
        model = record.get("model") if isinstance(record, dict) and record.get("schema") == SCHEMA else None
        if not isinstance(model, dict) or not all(name in model for name in (*_WHAT, "fingerprint")):
            raise InputError(f"--proof {path} is no result that this version of llmq eval saved with -o")
        verdict = (record.get("comparison") or {}).get("verdict")
        if verdict is None:
            raise InputError(
                f"--proof {path} has no verdict: llmq eval MODEL --tasks … or --data … --baseline ORIGINAL "
                "--max-drop 1% -o RESULT.json gives one"
            )
        if verdict != Verdict.PASS:
            raise FailedError(f"--proof {path}: its verdict is {verdict}, and only a PASS is served")
        return cls(path, model)

    def check_checkpoint(self, folder: Path) -> None:
        """Raises FailedError unless it is the one that was evaluated, wherever it lies now."""
        for name, value in identify_checkpoint(folder).items():
            if self.model[name] != value:
                raise FailedError(
                    f"--proof {self.path} is of another model: {_WHAT[name]} of {folder} is not what was evaluated "
                    f"({self.model.get('path')})"
                )

    def check_dtypes(self, dtypes: Dtypes) -> None:
        """What of the numerics is known before any weight is read. Raises FailedError."""
        was = self.model["fingerprint"]
        known = [
            ("dtype", was.get("dtype"), dtypes.dtype),
            ("kv_dtype", was.get("kv_dtype", "").partition(",")[0], dtypes.kv_dtype),
        ]
        self._refuse([one for one in known if one[1] != one[2]])

    def check_engine(self, info: EngineInfo) -> None:
        """Raises FailedError unless the engine that started computes as the one that was evaluated."""
        was, now = self.model["fingerprint"], info.fingerprint
        names = dict.fromkeys((*was, *now))
        self._refuse([(name, was.get(name), now.get(name)) for name in names if was.get(name) != now.get(name)])

    def _refuse(self, differences: list[tuple[str, Any, Any]]) -> None:
        if differences:
            listed = "; ".join(f"{name} was {was}, would be {now}" for name, was, now in differences)
            raise FailedError(f"--proof {self.path} is of other numerics: {listed}")
