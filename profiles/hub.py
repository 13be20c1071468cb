"""Models of the Hugging Face hub: whole snapshots, or config and weight headers alone. Offline is found out in 2 s."""

import contextlib
import json
import os
import shutil
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmq.profiles.cache import cache_dir, locked, whole_folder
from llmq.profiles.errors import FailedError, InputError
from llmq.profiles.progress import Progress, silent
from llmq.profiles.safetensors_file import REMOTE_HEADERS

_CONNECT_TIMEOUT_S = 1.5
_SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "quantize_config.json",
]
_ALL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "tokenizer*"]
# Copies of the weights for other programs, in folders or (Mistral's) beside them.
_NOT_NEEDED = ["*/*", "consolidated*"]


def download(repo: str, progress: Progress = silent) -> Path:
    """The snapshot folder of `repo` with all weights, from the hub or, where that cannot be reached, from its cache."""
    if not is_reachable():
        return _from_cache(repo, config_only=False)
    from huggingface_hub import snapshot_download

    with _hub_errors(repo):
        snapshot = Path(
            snapshot_download(
                repo,
                allow_patterns=_ALL_FILES,
                ignore_patterns=_NOT_NEEDED,
                tqdm_class=_bars(progress, f"downloading {repo}"),
            )
        )
    if absent := [name for name in ["config.json", *missing_files(snapshot)] if not (snapshot / name).exists()]:
        raise InputError(
            f"{repo} holds no {', '.join(absent[:3])}: llmq reads safetensors "
            "(of a repository of GGUF files, download one and give its path)"
        )
    return snapshot


def download_config(repo: str) -> Path:
    """A folder with the small files of `repo` and the headers of its weights (REMOTE_HEADERS), but no weights."""
    if not is_reachable():
        return _from_cache(repo, config_only=True)
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import NotASafetensorsRepoError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # of the header reads, which take no class of their own
    with _hub_errors(repo):
        snapshot = Path(snapshot_download(repo, allow_patterns=_SMALL_FILES, tqdm_class=_bars(silent, "")))
        target = _headers_folder(repo, snapshot.name)
        if missing_files(snapshot) == []:
            return snapshot
        with locked(target):
            if target.exists():
                return target
            try:
                metadata = HfApi().get_safetensors_metadata(repo, revision=snapshot.name)
            except NotASafetensorsRepoError:
                return snapshot
            with whole_folder(target) as folder:
                for file in snapshot.iterdir():
                    if file.name in _SMALL_FILES:
                        shutil.copy(file, folder)
                headers = {name: _as_header(file) for name, file in metadata.files_metadata.items()}
                (folder / REMOTE_HEADERS).write_text(json.dumps(headers), encoding="utf-8")
    return target


def _as_header(file: Any) -> dict[str, Any]:
    return {
        name: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": tensor.data_offsets}
        for name, tensor in file.tensors.items()
    }


def _headers_folder(repo: str, commit: str) -> Path:
    return cache_dir() / "hub" / repo.replace("/", "--") / commit


def cached(repo: str) -> Path | None:
    """The snapshot folder of `repo` when all its weights are here; None otherwise. Asks no network."""
    snapshot = _cached_snapshot(repo)
    return snapshot if snapshot and missing_files(snapshot) == [] else None


def _cached_snapshot(repo: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def missing_files(snapshot: Path) -> list[str]:
    """Weight files that the folder should hold and does not."""
    index = snapshot / "model.safetensors.index.json"
    if index.exists():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(name for name in names if not (snapshot / name).exists())
    return [] if any(snapshot.glob("*.safetensors")) else ["model.safetensors"]


def _from_cache(repo: str, config_only: bool) -> Path:
    from huggingface_hub import constants

    snapshot = _cached_snapshot(repo)
    if snapshot and config_only:
        headers = _headers_folder(repo, snapshot.name)
        return headers if headers.exists() else snapshot
    if snapshot and not (missing := missing_files(snapshot)):
        return snapshot
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
    if snapshot:
        raise InputError(
            f"{why}, and the cached copy of {repo} is incomplete: {', '.join(missing[:3])}"
            f"{', …' if len(missing) > 3 else ''} missing from {snapshot}"
        )
    raise InputError(
        f"{why}, and {repo} is not in the cache ({constants.HF_HUB_CACHE}); connect, set HF_ENDPOINT to a mirror, "
        "or give a local folder or .gguf file"
    )


def is_reachable() -> bool:
    """Whether the hub, or the proxy in front of it, takes a connection within 1.5 s. False under HF_HUB_OFFLINE."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    url = urlsplit(constants.ENDPOINT)
    host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and not urllib.request.proxy_bypass(host):
        through = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        host, port = through.hostname or "", through.port or 80
    return _connects(host, port)


def _connects(host: str, port: int) -> bool:
    # In a thread: a name server that does not answer would hold getaddrinfo for many seconds, and it takes no timeout.
    connected = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S):
            connected.set()

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_CONNECT_TIMEOUT_S)
    return connected.is_set()


@contextlib.contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Turn the hub library's exceptions into answers."""
    import httpx
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError:
        raise InputError(
            f"{repo} is gated: accept its terms at {constants.ENDPOINT}/{repo}, then `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        token = "your token does not open it" if os.environ.get("HF_TOKEN") else "private ones need HF_TOKEN"
        raise InputError(f"{constants.ENDPOINT} has no model {repo} that you may see ({token})") from None
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, httpx.HTTPError) as error:
        raise FailedError(f"{constants.ENDPOINT}, {repo}: {str(error).strip().splitlines()[0]}") from None


def _bars(progress: Progress, stage: str) -> type:
    """A class that the hub library takes for tqdm and that reports the bytes of all files together."""
    from tqdm.auto import tqdm

    class Bars(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            self._reported_s = 0.0
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})
            self.total = kwargs.get("total")

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0  # a disabled tqdm counts nothing
            finished = self.total and self.n >= self.total
            if self._counts_bytes and (finished or time.monotonic() - self._reported_s > 0.1):
                self._reported_s = time.monotonic()
                progress(stage, int(self.n), int(self.total) if self.total else None, unit="B")

    return Bars
