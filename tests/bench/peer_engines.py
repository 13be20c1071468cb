"""The engines of `bench_peers.py`, its rows of work, and the processes that do it: one of each engine at a time."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kept_pieces import Piece

from llmq.profiles.checkpoint import find_model

HERE = Path(__file__).parent
GGUF_NAME = "model.gguf"
LONG = 8184  # the model's context is 8,192: room for what is generated


@dataclass(frozen=True)
class Engine:
    """`group`: the folder under $PEERS that its Python lies in; ours where that is empty."""

    name: str
    title: str
    group: str
    model: str  # in the folder --work; empty: the model itself
    weights: str
    one_process: bool = False  # for all works: it takes minutes to start


ENGINES = (
    Engine("llmq", "llmq", "", "llmq-int4", "int4, groups of 64"),
    Engine("llmq-int8", "llmq, int8 activations and KV", "", "llmq-int4", "int4, groups of 64"),
    Engine("llmq-gguf", "llmq, llama.cpp's file", "", GGUF_NAME, "blocks of the GGUF"),
    Engine("llamacpp", "llama.cpp", "llamacpp", GGUF_NAME, "blocks of the GGUF"),
    Engine("openvino-int4", "OpenVINO", "openvino", "openvino-int4", "int4, groups of 64"),
    Engine("openvino-fp16", "OpenVINO", "openvino", "openvino-fp16", "fp16"),
    Engine("vllm", "vLLM", "vllm", "", "bf16", one_process=True),
    Engine("transformers", "transformers", "transformers", "", "bf16"),
)


@dataclass(frozen=True)
class Row:
    """`streams`: sequences that its processes are made for; `context`: tokens of one. `after`: a row that was measured
    before; a peer that was far behind there is left out here."""

    name: str
    title: str
    work: str
    size: int = 1
    streams: int = 16
    context: int = 1024
    unit: str = "tokens/s"
    after: str = ""

    @property
    def higher_is_better(self) -> bool:
        return self.unit == "tokens/s"

    @property
    def made_for(self) -> tuple[int, int]:
        return self.streams, self.context


ROWS = (
    Row("start", "process start to first token", "start", unit="s"),
    Row("decode", "decode, batch 1", "decode"),
    Row("streams-16", "16 mixed streams", "streams", 16),
    Row("prefill-1024", "prefill of 1,024", "prefill", 1024),
    Row("streams-64", "64 mixed streams", "streams", 64, streams=64, after="streams-16"),
    Row("prefill-8184", f"prefill of {LONG:,}", "prefill", LONG, streams=1, context=LONG + 8),
)


class Worker:
    """An engine's process, stopped except while it answers."""

    def __init__(self, engine: Engine, row: Row, arguments: argparse.Namespace) -> None:
        streams, context = (64, LONG + 8) if engine.one_process else row.made_for
        script = arguments.scripts / f"peer_{engine.group}.py" if engine.group else HERE / "peer_llmq.py"
        model = arguments.work / engine.model if engine.model else find_model(arguments.model)
        worker = [HERE / "peer_worker.py", arguments.scripts, context, script]
        # transformers' script has no limit of streams to be told.
        told = [] if engine.group == "transformers" else [streams]
        command = [python_of(engine, arguments), *worker, engine.name, model, *told]
        environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(HERE)}
        environment.pop("OPENBLAS_CORETYPE", None)
        self._log = arguments.work / f"{engine.name}.log"
        with open(self._log, "a") as log:
            self._process = subprocess.Popen(
                list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=environment, start_new_session=True,
            )  # fmt: skip
        self._name = engine.name
        self.start_seconds = self._answer()["seconds"]
        self._signal(signal.SIGSTOP)

    def do(self, work: str, size: int, turn: int) -> Piece:
        self._signal(signal.SIGCONT)
        print(json.dumps({"work": work, "size": size, "turn": turn}), file=self._process.stdin, flush=True)
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> Piece:
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise ChildProcessError(f"{self._name} ended with {code}: see {self._log}")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)


class Workers:
    """Those that are needed, each made when it is first asked."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._workers: dict[tuple[str, tuple[int, int] | None], Worker] = {}

    def of(self, engine: Engine, row: Row) -> Worker:
        key = (engine.name, None if engine.one_process else row.made_for)
        if key not in self._workers:
            self._workers[key] = Worker(engine, row, self._arguments)
        return self._workers[key]

    def end(self, row: Row | None = None) -> None:
        """All but what `row` needs, and those that serve all rows."""
        ended = [key for key in self._workers if row is None or key[1] not in (None, row.made_for)]
        for key in ended:
            self._workers.pop(key).end()


def python_of(engine: Engine, arguments: argparse.Namespace) -> Path:
    own = arguments.peers / engine.group / "bin" / "python"
    # transformers is a dependency of llmq's extras: its own environment is not needed.
    is_here = not engine.group or (engine.group == "transformers" and not own.exists())
    return Path(sys.executable) if is_here else own
