"""A model folder made without torch, and a hub on this machine: the model hub's endpoints, files from memory."""

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from llmq.profiles.safetensors_file import TensorInfo, tensor_bytes, write_file

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/models/([\w.-]+/[\w.-]+)(?:/(revision|tree)/([\w.-]+))?")
_FILE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/([\w.-]+)/(.+)")


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def bf16_folder(tmp_path: Path) -> Path:
    """A random Llama of 2 layers with an untied head: config.json, generation_config.json and model.safetensors."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    write_bf16(folder / "model.safetensors", llama_shapes(CONFIG))
    return folder


def llama_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv = hidden // heads * config["num_key_value_heads"]
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    for index in range(config["num_hidden_layers"]):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (config["vocab_size"], hidden)
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def write_bf16(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    tensors = [
        TensorInfo(name, "BF16", shape, tensor_bytes("BF16", shape), path.name) for name, shape in shapes.items()
    ]
    write_file(path, tensors, iter(os.urandom(tensor.num_bytes) for tensor in tensors))


@dataclass
class FakeHub:
    """`repos`: id -> {path: content}. `refusals`: id -> (status, X-Error-Code) for every request of that repo."""

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    bytes_sent: dict[str, int] = field(default_factory=dict)  # path -> bytes of its content


@pytest.fixture
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        if match := _API.fullmatch(path):
            self._api(match.group(1), match.group(2))
        elif match := _FILE.fullmatch(path):
            self._file(match.group(1), match.group(3))
        else:
            self._refuse(404, "")

    def _refused(self, repo: str) -> bool:
        if repo in self.hub.refusals:
            self._refuse(*self.hub.refusals[repo])
            return True
        if repo not in self.hub.repos:
            self._refuse(401, "RepoNotFound")  # as the hub answers without a token
            return True
        return False

    def _api(self, repo: str, what: str | None) -> None:
        if self._refused(repo):
            return None
        files = self.hub.repos[repo]
        if what == "tree":
            entries = [
                {"type": "file", "path": path, "size": len(content), "oid": _etag(content)}
                for path, content in files.items()
            ]
            return self._send(json.dumps(entries).encode())
        info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]}
        return self._send(json.dumps(info).encode())

    def _file(self, repo: str, path: str) -> None:
        if self._refused(repo):
            return None
        content = self.hub.repos[repo].get(path)
        if content is None:
            return self._refuse(404, "EntryNotFound")
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        status = 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(wanted.group(1)), min(int(wanted.group(2) or len(content)) + 1, len(content))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            content, status = content[start:stop], 206
        if self.command == "GET":
            self.hub.bytes_sent[path] = self.hub.bytes_sent.get(path, 0) + len(content)
        return self._send(content, status, headers)

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"{}", status, {"X-Error-Code": code} if code else {})

    def _send(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
