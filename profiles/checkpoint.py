"""Find a model by any of its names, and read what its files say about themselves."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.errors import InputError
from llmq.profiles.model_name import ModelName, parse_model_name
from llmq.profiles.progress import Progress, silent
from llmq.profiles.safetensors_file import REMOTE_HEADERS, TensorInfo, parse_header, read_header


def find_model(
    name: str, *, config_only: bool = False, keep_blocks: bool = False, progress: Progress | None = None
) -> Path:
    """The local folder of a model: a folder, a .gguf file, an alias (`smollm2-135m`) or a hub id (`org/name`).

    The folder holds config.json, safetensors and the tokenizer's files. `config_only`: config.json is enough (and
    `name` may be such a file itself); weights are not downloaded or converted for it. `keep_blocks`: of a .gguf file
    a folder whose linears stay in its blocks, for the runtime; else they are made bf16. Raises InputError that names
    what is missing, and the nearest folder for a mistyped path, which is never looked up on the hub.
    """
    progress = progress or silent
    parsed = parse_model_name(name)
    if parsed.kind == "folder":
        return _checked_folder(parsed.path, config_only)
    if parsed.kind == "config":
        if not config_only:
            raise InputError(f"{name} is a config alone; this needs the weights: give the folder that holds both")
        return parsed.path
    if parsed.kind == "gguf":
        from llmq.profiles import gguf_convert

        if config_only:
            return gguf_convert.config_only(parsed.path, keep_blocks)
        return gguf_convert.converted(parsed.path, progress, keep_blocks)
    return _remote(parsed, config_only, progress)


def _remote(parsed: ModelName, config_only: bool, progress: Progress) -> Path:
    if parsed.kind == "alias":
        from llmq.profiles.package_models import package_model

        return package_model(parsed.name, config_only, progress)
    from llmq.profiles import hub

    if config_only:
        return hub.download_config(parsed.name)
    return hub.download(parsed.name, progress)


def _checked_folder(path: Path, config_only: bool) -> Path:
    if not (path / "config.json").is_file():
        raise InputError(f"{path} holds no config.json, so it is no model folder")
    if not config_only and not any(path.glob("*.safetensors")):
        others = sorted(file.name for pattern in ("*.bin", "*.pth", "*.pt", "*.gguf") for file in path.glob(pattern))
        raise InputError(
            f"{path} holds no .safetensors weights"
            + (f" (it holds {', '.join(others[:3])}, which llmq does not read from a folder)" if others else "")
        )
    return path


_CAST_DTYPES = ("F64", "F32", "F16", "BF16")  # to the dtype of the activations, when they are loaded


@dataclass(frozen=True)
class Checkpoint:
    """A model folder as its config and its safetensors headers describe it. No weight was read."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    quantization: dict[str, Any] | None  # config.json's quantization_config, or GPTQ's quantize_config.json

    @cached_property
    def architecture(self) -> ModelArchitecture:
        """Raises InputError for one that the runtime does not run: what `kv-budget` sizes is more."""
        return ModelArchitecture.from_config(self.config).require_runnable()

    @property
    def total_bytes(self) -> int:
        """Of all tensors; the files are a header each larger."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def has_float_head(self) -> bool:
        """Whether the head is stored as floats of 16 bits or more, its own or the embedding's."""
        if self.architecture.tie_word_embeddings:
            return True
        head = self.tensors.get("lm_head.weight")
        return head is not None and head.dtype in _CAST_DTYPES

    def held_bytes(self, float_bytes: int) -> int:
        """Of all tensors in memory: floats of 16 bits and more in `float_bytes` each, packed ones as stored."""
        return sum(self.tensor_bytes(float_bytes).values())

    def tensor_bytes(self, float_bytes: int | None = None) -> dict[str, int]:
        """Of each tensor in memory (`held_bytes`); None: as stored."""
        return {
            name: tensor.num_elements * float_bytes
            if float_bytes is not None and tensor.dtype in _CAST_DTYPES
            else tensor.num_bytes
            for name, tensor in self.tensors.items()
        }


def has_weights(path: Path) -> bool:
    """Whether the folder `path` holds weights, or their headers (a hub model of which only the config was taken)."""
    return path.is_dir() and ((path / REMOTE_HEADERS).is_file() or any(path.glob("*.safetensors")))


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a folder, or that file itself."""
    return _read_json(path / "config.json" if path.is_dir() else path)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read config and headers of the folder `path`. Raises InputError for a missing, foreign or truncated file."""
    path = Path(path)
    config = read_config(path)
    return Checkpoint(path, config, _read_tensors(path), read_quantization(path, config))


def _read_tensors(path: Path) -> dict[str, TensorInfo]:
    # AutoGPTQ names both after the quantization: gptq_model-4bit-128g.safetensors.
    index = next(iter(sorted(path.glob("*.safetensors.index.json"))), path / "model.safetensors.index.json")
    remote = path / REMOTE_HEADERS
    if remote.is_file():
        headers = _read_json(remote)
        return {name: info for file, header in headers.items() for name, info in parse_header(header, file).items()}
    if not index.is_file():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise InputError(f"{path} holds no .safetensors weights")
        return {name: info for file in files for name, info in read_header(file).items()}
    weight_map: dict[str, str] = _read_json(index).get("weight_map", {})
    files = [path / name for name in sorted(set(weight_map.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise InputError(
            f"{path}: {len(missing)} of {len(files)} weight files are missing: {', '.join(missing[:3])}"
            + (", …" if len(missing) > 3 else "")
        )
    tensors = {name: info for file in files for name, info in read_header(file).items()}
    if absent := [name for name, file in weight_map.items() if name not in tensors or tensors[name].file != file]:
        raise InputError(f"{index}: {absent[0]} is not in {weight_map[absent[0]]} ({len(absent)} such tensors)")
    return tensors


def read_quantization(path: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """The quantization that config.json (also under text_config) or AutoGPTQ's quantize_config.json declares."""
    nested = config.get("text_config") or {}
    found = config.get("quantization_config") or nested.get("quantization_config")
    gptq = path / "quantize_config.json"  # `path` may be a config.json alone
    if gptq.is_file():
        # AutoGPTQ's own file is the one it loads by: where the two differ (group_size -1 against 128), it is right.
        return {**(found or {}), "quant_method": "gptq", **_read_json(gptq)}
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"no file {path}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: a JSON object is expected")
    return content
