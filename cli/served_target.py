"""A TARGET of a verb: a server that is there, or a model that is served for as long as the verb runs."""

import contextlib
from collections.abc import Iterator

from llmq.cli import console
from llmq.profiles.errors import InputError


def is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


@contextlib.contextmanager
def server_of(target: str, options: list[str], *, loading: str | None = None) -> Iterator[str]:
    """The base URL of `target`: where it is one itself, or of a server that lives as long as the block.

    `options`: of `llmq serve`. `loading`: the verb, where it is to say what it loads.
    """
    if is_url(target):
        yield target.rstrip("/").removesuffix("/v1")
        return
    from llmq.cli.local_server import serving
    from llmq.profiles.checkpoint import find_model

    with console.progress() as progress:
        folder = find_model(target, keep_blocks=True, progress=progress)
    if loading is not None:
        console.status(f"{loading}: loading {folder}")
    with serving(folder, *options) as url:
        yield url


def model_name(url: str, wanted: str | None, api_key: str | None) -> str:
    """The model to ask for. Raises InputError where the server has it not, wants a key, or is none.

    A server without a list of models is taken at the user's word."""
    import httpx

    from llmq.cli.local_server import authorization, error_message

    try:
        response = httpx.get(f"{url}/v1/models", headers=authorization(api_key), timeout=30, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(f"nothing answers at {url}: {error or type(error).__name__}") from None
    if response.status_code == 401:
        raise InputError(f"{url}: {error_message(response)} (--api-key, or LLMQ_API_KEY)")
    if response.status_code == 404 and wanted is not None:
        return wanted
    try:
        names = [one["id"] for one in response.raise_for_status().json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        raise InputError(
            f"{url}/v1/models is not OpenAI's list of models (status {response.status_code}): is it the base "
            "URL, before /v1? A server that has no list needs --model NAME"
        ) from None
    if not names or (wanted is not None and wanted not in names):
        raise InputError(f"{url} has no model {wanted!r}; it has {', '.join(names) or 'none'}")
    return wanted or names[0]
