"""What a model's generation_config.json says of sampling, for requests that say nothing."""

import json
from pathlib import Path
from typing import Any

from llmq.profiles.errors import InputError
from llmq.runtime.frontend.errors import InvalidRequestError
from llmq.runtime.frontend.input_processor import check_range

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_FIELDS = (*_SAMPLING, "repetition_penalty")


def generation_defaults(folder: str | Path) -> dict[str, Any]:
    """By SamplingParams' names. Where the file says `do_sample` false, it says nothing of sampling.

    Raises InputError for values that no request could have.
    """
    path = Path(folder) / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        fields = _FIELDS if config.get("do_sample", True) else _FIELDS[len(_SAMPLING) :]
        defaults = {name: config[name] for name in fields if config.get(name) is not None}
        for name, value in defaults.items():
            if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
                raise InvalidRequestError(f"{name} must be a number, got {value!r}")
            if name != "top_k":
                check_range(name, value)
            elif value < -1:
                raise InvalidRequestError(f"top_k must be at least -1, got {value}")
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path}: {error} (--generation-config openai leaves the file aside)") from error
    return defaults
