"""A model that a running server serves, as something to evaluate: what it says of itself, and its tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from llmq.evals.remote_engine import RemoteEngine, authorization, check_abilities
from llmq.evals.result import identify_checkpoint
from llmq.profiles.errors import InputError
from llmq.runtime.frontend.tokenizer import Tokenizer
from llmq.runtime.request import EngineInfo


@dataclass(frozen=True)
class ServedSubject:
    """`folder` is where the model's tokenizer was read: the server's own (`root` of its model card), or as given."""

    url: str
    model: str
    folder: Path
    engine: RemoteEngine
    tokenizer: Tokenizer
    is_servers_folder: bool

    @classmethod
    def open(cls, url: str, *, tokenizer_folder: Path | None = None, api_key: str | None = None) -> "ServedSubject":
        """Raises InputError where nothing answers, its tokenizer is not here, or it lacks what is needed."""
        url = url.rstrip("/").removesuffix("/v1")
        card = _ask(url, "/v1/models", api_key)
        try:
            model, longest, root = (card["data"][0].get(name) for name in ("id", "max_model_len", "root"))
        except (KeyError, IndexError, TypeError, AttributeError):
            raise InputError(f"{url}/v1/models is not OpenAI's list of models") from None
        folder = tokenizer_folder or (Path(root) if root else None)
        if folder is None or not (folder / "tokenizer.json").is_file():
            raise InputError(
                f"the tokenizer of {model} at {url} is not here ({root or 'the server names no folder'}): "
                "--tokenizer FOLDER names one"
            )
        if longest is None:
            raise InputError(f"{url}/v1/models does not tell max_model_len, by which prompts are cut: it is needed")
        check_abilities(url, model, api_key=api_key)
        numerics = _numerics(url, api_key)
        tokenizer = Tokenizer.from_folder(folder)
        info = EngineInfo(
            model=model,
            vocab_size=tokenizer.vocab_size,
            max_model_len=longest,
            eos_token_ids=sorted(tokenizer.eos_token_ids),
            num_blocks=0,
            block_tokens=0,
            kv_cache_bytes=0,
            weight_bytes=0,
            device="remote",
            fingerprint=numerics or {"server": url},
        )
        engine = RemoteEngine(url, model, info, api_key=api_key, scores_from=numerics is not None)
        return cls(url, model, folder, engine, tokenizer, tokenizer_folder is None)

    def describe(self) -> dict[str, Any]:
        """As `describe_model` does; the checkpoint is identified where its folder is the server's own."""
        identity: dict[str, Any] = identify_checkpoint(self.folder) if self.is_servers_folder else {"sha256": None}
        return {
            "path": self.url,
            "served_model": self.model,
            **identity,
            "max_model_len": self.engine.info.max_model_len,
            "fingerprint": dict(self.engine.info.fingerprint),
        }


def _ask(url: str, path: str, api_key: str | None) -> Any:
    try:
        response = httpx.get(f"{url}{path}", headers=authorization(api_key), timeout=30, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(f"nothing answers at {url}: {error or type(error).__name__}") from None
    if response.status_code == 401:
        raise InputError(f"{url} wants a key: --api-key, or LLMQ_API_KEY")
    try:
        return response.raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        raise InputError(f"{url}{path} answers {response.status_code}: not an OpenAI-shaped server") from None


def _numerics(url: str, api_key: str | None) -> dict[str, str] | None:
    """What llmq's own server says of its arithmetic; None where it is another's."""
    try:
        numerics = _ask(url, "/version", api_key)["numerics"]
    except (InputError, KeyError, TypeError):
        return None
    return numerics if isinstance(numerics, dict) else None
