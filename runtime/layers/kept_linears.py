"""Native linears and the cache of packed weights: what is kept of one, and one of what was kept."""

import hashlib
from pathlib import Path
from typing import Any

from llmq.quantize import formats
from llmq.runtime.kernels import native
from llmq.runtime.layers.linear import Linear, SplitLinear
from llmq.runtime.layers.native_linear import NativeLinear
from llmq.runtime.packed_cache import PackedEntry

_RUNTIME = Path(__file__).parents[1]


def entry_of(linear: Linear, facts: dict[str, Any]) -> PackedEntry | None:
    """With `facts` beside its own; None for a linear that is not native, which is not kept."""
    parts = linear.parts if isinstance(linear, SplitLinear) else [linear]
    if not all(isinstance(part, NativeLinear) for part in parts):
        return None
    tensors = {f"{index}.{name}": tensor for index, part in enumerate(parts) for name, tensor in part.tensors.items()}
    return PackedEntry({**facts, "linears": [part.packed_facts for part in parts]}, tensors)


def linear_of(entry: PackedEntry) -> Linear:
    parts = []
    for index, facts in enumerate(entry.facts["linears"]):
        own = f"{index}."
        tensors = {name.removeprefix(own): one for name, one in entry.tensors.items() if name.startswith(own)}
        parts.append(NativeLinear.from_packed(facts, tensors))
    return parts[0] if len(parts) == 1 else SplitLinear(parts)


def packing_code() -> str:
    """The version of all code between a checkpoint's bytes and packed ones: of its files, so that nobody has to think
    of raising a number."""
    names = ("weights.py", "packed_cache.py", "layers/linear.py", "layers/native_linear.py", "parallel/shard_plan.py")
    ours = [_RUNTIME / name for name in names]
    read = [path for folder in formats.__path__ for path in sorted(Path(folder).glob("*.py"))]
    digest = hashlib.sha256()
    for path in (*ours, Path(__file__), *read, Path(native.__file__)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
