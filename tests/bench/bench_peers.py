"""llmq beside llama.cpp, OpenVINO, vLLM and transformers on one machine, on the same work, in turns.

The work and each peer's script are those of the folder `peers` of the shared data; `install.sh` there installs the
peers, each apart, under $PEERS. A peer that is not installed is left out and named. Each engine is a process of its
own that is held while another works (SIGSTOP), so that nothing spins beside what is measured. Engines take turns, A B C
A B C, and the median of the turns is shown with their extremes. In a row of works a peer whose first turn falls short
of the best peer's by more than --drop times gets no further one: it cannot be the best, and the table shows its turns.
Who is so far behind at 16 streams is left out at 64.

Each turn is kept under --work: the same command goes on where it was ended.

    bench_peers.py --prepare --work FOLDER       # the models of the peers, once: not measured
    bench_peers.py --work FOLDER --json > RESULT.json
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import bench_report
from bench_report import Report
from gguf import GGUFReader
from kept_pieces import KeptPieces, Piece
from peer_engines import ENGINES, GGUF_NAME, ROWS, Engine, Row, Worker, Workers, python_of

from llmq.cli import console
from llmq.profiles.checkpoint import find_model, read_checkpoint
from llmq.profiles.package_models import package_gguf

RECIPE = ("--rtn", "--sym", "--group-size", "64", "--format", "gptq")


def one_turn(engine: Engine, row: Row, turn: int, workers: Workers, arguments: argparse.Namespace) -> Piece:
    try:
        if row.work == "start":
            if engine.one_process:
                return {"seconds": workers.of(engine, row).start_seconds}
            worker = Worker(engine, row, arguments)
            worker.end()
            return {"seconds": worker.start_seconds}
        return workers.of(engine, row).do(row.work, row.size, turn)
    except ChildProcessError as error:
        return {"error": str(error)}


def figure_of(row: Row, piece: Piece) -> float:
    if row.work == "start":
        return piece["seconds"]
    return piece["tokens"] / piece["seconds"]


def measure_row(
    row: Row, engines: Sequence[Engine], kept: KeptPieces, workers: Workers, arguments: argparse.Namespace
) -> dict[str, list[Piece]]:
    """Turns of those engines."""
    made: dict[str, list[Piece]] = {engine.name: [] for engine in engines}
    going = list(engines)
    for turn in range(arguments.turns):
        for engine in going:
            name = f"{row.name}.{engine.name}.{turn}"
            if (piece := kept.find(name)) is None:
                console.status(
                    f"{time.strftime('%H:%M:%S')}  {row.title}, turn {turn + 1} of {arguments.turns}: {engine.name}"
                )
                piece = one_turn(engine, row, turn, workers, arguments)
                kept.keep(name, piece)
            made[engine.name].append(piece)
        going = still_in_it(row, going, made, arguments.drop)
    return made


def still_in_it(row: Row, engines: list[Engine], made: dict[str, list[Piece]], drop: float) -> list[Engine]:
    """Without those that failed or can be started once, and without peers that are far behind the best peer."""
    ran = [engine for engine in engines if "error" not in made[engine.name][-1]]
    figures = {engine.name: figure_of(row, made[engine.name][0]) for engine in ran}
    peers = [figures[engine.name] for engine in ran if engine.group]
    if row.work == "start":
        ran = [engine for engine in ran if not engine.one_process]
    if not peers:
        return ran
    if row.higher_is_better:
        return [one for one in ran if not one.group or figures[one.name] * drop >= max(peers)]
    return [one for one in ran if not one.group or figures[one.name] <= min(peers) * drop]


def measure(arguments: argparse.Namespace) -> Report:
    engines, left_out = installed(arguments)
    rows = [row for row in ROWS if row.name in arguments.rows]
    kept = KeptPieces(arguments.work / "pieces", {"turns": arguments.turns, "drop": arguments.drop})
    workers = Workers(arguments)
    made: dict[str, dict[str, list[Piece]]] = {}
    try:
        for row in rows:
            workers.end(row)
            going = engines
            if row.after in made:
                going = still_in_it(
                    next(one for one in rows if one.name == row.after), engines, made[row.after], arguments.drop
                )
            made[row.name] = measure_row(row, going, kept, workers, arguments)
    finally:
        workers.end()
    figures = [summary(row, one, made[row.name]) for row in rows for one in engines if one.name in made[row.name]]
    for figure in figures:
        pieces = made[figure["work"]][figure["engine"]]
        if figure["work"] == "decode" and "error" not in figure:
            figure["weights_read_bytes"] = pieces[0]["weights_read_bytes"] or file_bytes(figure["engine"], arguments)
        # So far, of the process that did these works.
        figure["peak_bytes"] = max((piece["peak_bytes"] for piece in pieces if "peak_bytes" in piece), default=None)
    return Report(
        f"2 threads each, in turns, {arguments.turns} of an engine that is not far behind",
        ["work", "engine", "weights", ">MB of weights a token", ">median", "unit", ">lowest", ">highest", ">turns",
         ">times the best peer", ">peak MiB"],
        [line_of(figure) for figure in figures],
        {"turns": arguments.turns, "drop": arguments.drop, "left_out": left_out, "measurements": figures},
        [f"not installed under {arguments.peers}: {', '.join(left_out)}"] if left_out else [],
    )  # fmt: skip


def summary(row: Row, engine: Engine, made: dict[str, list[Piece]]) -> dict[str, Any]:
    """`ratio`: how many times better ours is than the best peer."""
    found = {name: [figure_of(row, piece) for piece in pieces if "error" not in piece] for name, pieces in made.items()}
    figure: dict[str, Any] = {"work": row.name, "engine": engine.name}
    own = found[engine.name]
    if not own:
        return figure | {"error": made[engine.name][-1]["error"]}
    figure |= {"unit": row.unit, "median": median(own), "lowest": min(own), "highest": max(own), "turns": len(own)}
    peers = [median(found[one.name]) for one in ENGINES if one.group and found.get(one.name)]
    if not engine.group and peers:
        ratio = median(own) / max(peers) if row.higher_is_better else min(peers) / median(own)
        figure["ratio"] = ratio
    return figure


def file_bytes(name: str, arguments: argparse.Namespace) -> int:
    """Of the weights that an engine reads for a token: all in its files but an embedding that is not its head too."""
    (engine,) = (one for one in ENGINES if one.name == name)
    path = arguments.work / engine.model
    if engine.model == GGUF_NAME:
        sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(path).tensors}
        unread = sizes["token_embd.weight"] if "output.weight" in sizes else 0
    elif engine.model:
        sizes, unread = {file: file.stat().st_size for file in weight_files(path)}, 0
    else:
        sizes = read_checkpoint(find_model(arguments.model)).tensor_bytes()
        unread = sizes["model.embed_tokens.weight"] if "lm_head.weight" in sizes else 0
    return sum(sizes.values()) - unread


def weight_files(folder: Path) -> list[Path]:
    return [folder / "openvino_model.bin"] if folder.name.startswith("openvino") else list(folder.glob("*.safetensors"))


def line_of(figure: dict[str, Any]) -> list[Any]:
    (engine,) = (one for one in ENGINES if one.name == figure["engine"])
    (row,) = (one for one in ROWS if one.name == figure["work"])
    read = f"{figure['weights_read_bytes'] / 1e6:,.1f}" if "weights_read_bytes" in figure else ""
    start = [row.title, engine.title, engine.weights, read]
    if "error" in figure:
        return [*start, "failed", "", "", "", "", "", ""]
    median_, lowest, highest = (f"{figure[name]:,.4g}" for name in ("median", "lowest", "highest"))
    ratio = f"{figure['ratio']:.2f}" if "ratio" in figure else ""
    peak = f"{figure['peak_bytes'] / 2**20:,.0f}" if figure["peak_bytes"] else ""
    return [*start, median_, row.unit, lowest, highest, figure["turns"], ratio, peak]


def installed(arguments: argparse.Namespace) -> tuple[list[Engine], list[str]]:
    """(engines that can run here, names of the others). Ends the program where the shared scripts or models are not."""
    if not (arguments.scripts / "workload.py").is_file():
        sys.exit(
            f"{arguments.scripts} holds no workload.py: set LLMQ_SHARED to the folder of shared data, whose folder "
            "`peers` has the work and the peers' scripts"
        )
    wanted = [engine for engine in ENGINES if engine.name in arguments.engines]
    found = [engine for engine in wanted if python_of(engine, arguments).exists()]
    if not found:
        sys.exit(f"{', '.join(arguments.engines)} not under {arguments.peers}: install.sh of {arguments.scripts}")
    models = {engine.model for engine in found if engine.model}
    if missing := sorted(model for model in models if not (arguments.work / model).exists()):
        sys.exit(f"{arguments.work} lacks {', '.join(missing)}: run once with --prepare")
    return found, [engine.name for engine in wanted if engine not in found]


def prepare(arguments: argparse.Namespace) -> None:
    """Make the models that are not there yet."""
    work, source = arguments.work, find_model(arguments.model)
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "llmq-int4").exists():
        run(sys.executable, "-m", "llmq", "quantize", source, *RECIPE, "-o", work / "llmq-int4")
    if not (work / GGUF_NAME).exists():
        with console.progress() as progress:
            package_gguf(arguments.model, work / GGUF_NAME, progress)
    export = arguments.peers / "openvino" / "bin" / "optimum-cli"
    formats = {"int4": ("int4", "--group-size", "64", "--ratio", "1.0"), "fp16": ("fp16",)}
    for name, options in formats.items():
        if export.exists() and not (work / f"openvino-{name}").exists():
            settings = ("--task", "text-generation-with-past", "--weight-format", *options)
            run(export, "export", "openvino", "-m", source, *settings, work / f"openvino-{name}")


def run(*command: Any) -> None:
    console.status(" ".join(map(str, command)))
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)


def main(argv: bench_report.Arguments = None) -> dict:
    options = bench_report.parser(__doc__)
    shared = bench_report.shared_path().parent
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "llmq-peers"
    engines, rows = ",".join(one.name for one in ENGINES), ",".join(row.name for row in ROWS)
    options.add_argument("--model", default="smollm2-135m", help="An alias; one --work for each.")
    options.add_argument("--work", type=Path, required=True, help="Folder of models and of each turn's result.")
    options.add_argument("--prepare", action="store_true", help="Only make the models that the engines run.")
    options.add_argument("--scripts", type=Path, default=shared / "peers", help="The shared folder `peers`.")
    options.add_argument("--peers", type=Path, default=Path(os.environ.get("PEERS") or cache), help="Their programs.")
    options.add_argument("--engines", type=bench_report.names, default=bench_report.names(engines), help=engines)
    options.add_argument("--rows", type=bench_report.names, default=bench_report.names(rows), help=rows)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--drop", type=float, default=1.5)
    arguments = options.parse_args(argv)
    if arguments.prepare:
        prepare(arguments)
        return {}
    return bench_report.run(arguments, measure)


if __name__ == "__main__":
    main()
