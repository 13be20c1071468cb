"""`llmq serve` as a program of its own: started, asked, ended."""

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx

LLMQ = Path(sys.executable).with_name("llmq")
# Several threads wait for one another at each operation: on a machine that others use too, that is much slower.
ONE_THREAD = ("--threads", "1")


class Served:
    """A running server. `stderr` is what it has said so far, the line that says it is ready included."""

    def __init__(self, model: Path, *flags: str, start_timeout_s: float = 120) -> None:
        self.process = subprocess.Popen(
            [LLMQ, "serve", model, "--port", "0", "--served-model-name", "smol", *ONE_THREAD, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.stderr = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(start_timeout_s), f"not ready after {start_timeout_s} s: {self.stderr}"
        found = re.search(r"http://127\.0\.0\.1:\d+", self.stderr)
        assert found, self.stderr
        self.url = found[0]
        self.http = httpx.Client(base_url=self.url, timeout=180)

    def post(self, path: str, **body) -> httpx.Response:
        return self.http.post(path, json={"model": "smol", **body})

    def complete(self, **body) -> dict:
        response = self.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, **body) -> list[dict]:
        """The objects of a stream, which must end with [DONE]."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]", lines[-1]
        return [json.loads(line) for line in lines[:-1]]

    def metric(self, name: str) -> float:
        text = self.http.get("/metrics").text
        return float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1])

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 60) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        self.http.close()
        return code

    def _read(self) -> None:
        for line in self.process.stderr:
            self.stderr += line
            if "http://" in line:
                self._ready.set()
        self._ready.set()
