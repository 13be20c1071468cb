"""AutoAWQ and AutoGPTQ, run as they are: the model and token ids go to them in files, a checkpoint comes back.

A folder beside OUT holds what passes between the two Pythons: the model as their old transformers reads it, `job.json`,
their checkpoint, `answer.json` with what the script measured, and their log. What they wrote is read by our readers and
then written and verified like what we compute ourselves.
"""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmq.profiles.checkpoint import Checkpoint, read_checkpoint
from llmq.profiles.errors import FailedError
from llmq.profiles.progress import Progress, silent
from llmq.quantize.backends.environment import clean_environment
from llmq.quantize.backends.libraries import ArchivedLibrary, relative_name, rope_scaling
from llmq.quantize.calibration import CalibrationSet
from llmq.quantize.formats.registry import format_of
from llmq.quantize.layer_result import LayerResult
from llmq.quantize.layer_stream import TensorReader
from llmq.quantize.preflight import Plan
from llmq.quantize.report import ScalingReport, linear_report
from llmq.quantize.targets import Target

# Tokens that the library's layers see at once.
_TOKENS_AT_ONCE = 4096


def layers(
    library: ArchivedLibrary,
    plan: Plan,
    calibration: CalibrationSet,
    device: torch.device,
    progress: Progress = silent,
) -> Iterator[LayerResult]:
    """Have the library quantize; one result a decoder layer. Raises FailedError with its words where it stops."""
    python = library.environment.python(progress)
    with _exchange(plan) as folder:
        _lay_out_source(plan.source, folder / "source")
        job = _job(library, plan, calibration, device, folder)
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        command = [str(python), "-I", str(library.script), str(folder / "job.json")]
        _run(library, command, device, folder / "log", progress)
        answer = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
        yield from _results(library, plan, read_checkpoint(folder / "out"), answer)


@contextlib.contextmanager
def _exchange(plan: Plan) -> Iterator[Path]:
    """The folder beside OUT; named as what `output_folder` clears away after a killed process."""
    folder = plan.out.absolute().parent / f".{plan.out.name}.partial-exchange-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lay_out_source(source: Checkpoint, folder: Path) -> None:
    """The model's files by link, and its config in the words of transformers 4, which reads RoPE's base and the dtype
    under other names and silently takes its own where it does not find them."""
    folder.mkdir()
    for path in source.path.iterdir():
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            (folder / path.name).symlink_to(path.absolute())
    rope, config = rope_scaling(source.config), {**source.config}
    for name in ("rope_parameters", "dtype", "transformers_version"):
        config.pop(name, None)
    theta = rope.pop("rope_theta", None)
    if theta is not None:
        config["rope_theta"] = theta
    # 4.38 knows "type" and nothing else beside the factor, 4.51 both.
    scaling = {"type": rope["rope_type"], **rope} if len(rope) > 2 else {"type": rope.pop("rope_type"), **rope}
    config["rope_scaling"] = None if scaling["type"] == "default" else scaling
    config["torch_dtype"] = source.architecture.dtype.removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _job(
    library: ArchivedLibrary, plan: Plan, calibration: CalibrationSet, device: torch.device, folder: Path
) -> dict[str, Any]:
    longest = max(map(len, calibration.samples))
    scheme = plan.recipe.scheme
    return {
        "source": str(folder / "source"),
        "out": str(folder / "out"),
        "answer": str(folder / "answer.json"),
        # Half precision has no fast products on a CPU, and a range of its own.
        "dtype": "float32" if device.type == "cpu" else "float16",
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "symmetric": scheme.symmetric,
        "left_out": sorted({relative_name(name) for name in plan.selection.left_alone if ".layers." in name}),
        "samples": calibration.samples,
        # The library joins the samples and cuts them anew.
        "seq_len": min(longest, calibration.num_tokens),
        "samples_at_once": max(1, _TOKENS_AT_ONCE // longest),
        "settings": library.settings,
    }


def _run(library: ArchivedLibrary, command: list[str], device: torch.device, log: Path, progress: Progress) -> None:
    """Run the script; each line it prints is progress as JSON."""
    environment = {**clean_environment(), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if device.type == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif device.index is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(device.index)
    progress("quantizing", 0, None, unit="layers")
    with (
        open(log, "w", encoding="utf-8") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        try:
            for line in process.stdout:
                with contextlib.suppress(ValueError, KeyError, TypeError):  # the library may print too
                    step = json.loads(line)
                    progress("quantizing", step["done"], step["total"], unit="layers")
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise FailedError(f"{library.title} stopped: {_last_words(log, process.returncode)}; {library.ours} may do")


def _last_words(log: Path, returncode: int) -> str:
    if returncode < 0:
        return f"killed by signal {-returncode} (9 is what a machine out of memory sends)"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {returncode}, without a word"


def _results(
    library: ArchivedLibrary, plan: Plan, written: Checkpoint, answer: dict[str, Any]
) -> Iterator[LayerResult]:
    read, layout = TensorReader(written), format_of(written.quantization, written.tensors)
    by_layer: dict[int, list[Target]] = {}
    for target in plan.targets:
        by_layer.setdefault(target.layer, []).append(target)
    changed = _changed(plan, written)
    for index, targets in by_layer.items():
        result = LayerResult(changed=changed.get(index, {}))
        for target in targets:
            weight = layout.read(target.name, read)
            measured = answer["linears"].get(target.name)
            if measured is None:
                raise FailedError(f"{library.title} did not quantize {target.name}")
            result.linears[target.name] = weight
            result.reports.append(linear_report(target, weight, **measured))
        result.scalings = [_scaling(entry) for entry in answer["scalings"] if entry["layer"] == index]
        yield result


def _changed(plan: Plan, written: Checkpoint) -> dict[int, dict[str, Tensor]]:
    """By layer, tensors that stay in 16 bit and are not what they were: norms and biases that took a scale.

    AutoGPTQ also writes a bias of zeros for each linear that has none.
    """
    read, read_source = TensorReader(written), TensorReader(plan.source)
    dtype = getattr(torch, plan.dtype)
    quantized = {f"{target.name}.weight" for target in plan.targets}
    changed: dict[int, dict[str, Tensor]] = {}
    for name in plan.source.tensors:
        if ".layers." not in name or name in quantized or name not in written.tensors:
            continue
        tensor = read(name).to(dtype)
        if not torch.equal(tensor, read_source(name).to(dtype)):
            changed.setdefault(int(name.split(".layers.", 1)[1].partition(".")[0]), {})[name] = tensor
    return changed


def _scaling(entry: dict[str, Any]) -> ScalingReport:
    prefix = f"model.layers.{entry['layer']}."
    return ScalingReport(
        layer=entry["layer"],
        source=prefix + entry["source"],
        linears=tuple(prefix + name for name in entry["linears"]),
        alpha=entry["alpha"],
        error=entry["error"],
    )
