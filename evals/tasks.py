"""Tasks that lm-eval knows by name, found fast, and refused fast where their data cannot be reached."""

import difflib
import importlib.util
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmq.evals.local_data import local_data_sets
from llmq.profiles import hub
from llmq.profiles.errors import InputError

_DECLARATION = re.compile(rb"^(?:task|group|tag):[ \t]*[\"']?([\w.+-]+)", re.MULTILINE)


@dataclass(frozen=True)
class LoadedTasks:
    """lm-eval's Task objects by name, data included, and the Group objects that sum some of them up."""

    tasks: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)


def quiet_libraries() -> None:
    """lm-eval's remarks on its own command line, and datasets' bars, are none of a user of ours."""
    import datasets

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()


def check_task_names(names: list[str]) -> None:
    """Raises InputError for a name that none of lm-eval's files mentions: from the files alone, in about a second.

    What passes may still be unknown to `load_named_tasks`."""
    package = importlib.util.find_spec("lm_eval")
    if package is None or not names:
        return
    unseen = {name: re.compile(rb"\b%s\b" % re.escape(name.encode())) for name in names}
    declared: set[str] = set()
    for path in (Path(package.submodule_search_locations[0]) / "tasks").rglob("*.y*ml"):
        content = path.read_bytes()
        unseen = {name: mention for name, mention in unseen.items() if not mention.search(content)}
        if not unseen:
            return
        declared.update(name.decode() for name in _DECLARATION.findall(content))
    raise _unknown(next(iter(unseen)), declared)


def load_named_tasks(names: list[str], data_dir: Path | None = None) -> LoadedTasks:
    """The tasks of these names; a group or tag brings all of its own.

    data_dir: local files instead of the hub's data sets, see `local_data`.

    Raises InputError on a name that lm-eval does not know, and, within seconds, on data that is neither reachable nor
    in the local cache, naming the data set.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False, include_path=_folders_that_name(names))
    if any(name not in manager.task_index for name in names):
        manager = _index_of_all()
    for name in names:
        if name not in manager.task_index:
            raise _unknown(name, manager.all_tasks)
    if data_dir is not None:
        with local_data_sets(data_dir):
            return _load_all(manager, names)
    if not hub.is_reachable():  # asked once, so that no minutes of retries follow
        _go_offline()
    return _load_all(manager, names)


def _load_all(manager: Any, names: list[str]) -> LoadedTasks:
    loaded = LoadedTasks()
    for name in names:
        try:
            found = _load(manager, name)
        except KeyError:  # a group whose members live in other folders
            manager = _index_of_all()
            found = _load(manager, name)
        loaded.tasks.update(found["tasks"])
        loaded.groups.update(found["groups"])
    return loaded


def _unknown(name: str, known: Iterable[str]) -> InputError:
    near = difflib.get_close_matches(name, known, n=3)
    hint = f" (near: {', '.join(near)})" if near else ""
    return InputError(f"lm-eval has no task {name!r}{hint}; a file of your own is evaluated with --data FILE.jsonl")


def _index_of_all() -> Any:
    """All of lm-eval's 14,000 files: some seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _load(manager: Any, name: str) -> dict[str, Any]:
    try:
        return manager.load([name])
    except (KeyError, InputError):
        raise
    except Exception as error:
        raise _unreachable(manager, name, error) from error


def _unreachable(manager: Any, name: str, error: Exception) -> InputError:
    config = manager.task_index[name].cfg or {}
    dataset = config.get("dataset_path", "a data set")
    subset = f" ({config['dataset_name']})" if config.get("dataset_name") else ""
    return InputError(
        f"task {name}: its data, {dataset}{subset}, could not be loaded: {_first_line(error)}. "
        "Without a hub, --data-dir DIR reads local files of it, and --data FILE.jsonl a set of your own"
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _folders_that_name(names: list[str]) -> list[Path]:
    """The folders of lm-eval's task tree with a file that mentions a name: indexing these alone takes a tenth."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    mention = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names).encode())
    folders: set[str] = set()
    for folder, _, files in os.walk(root):
        top = Path(folder).relative_to(root).parts[:1]
        if not top or top[0] in folders:
            continue
        for file in files:
            if file.endswith((".yaml", ".yml")) and mention.search((Path(folder) / file).read_bytes()):
                folders.add(top[0])
                break
    return [root / folder for folder in sorted(folders)]


def _go_offline() -> None:
    """What HF_HUB_OFFLINE=1 does, for libraries that read it when they were imported: the local cache alone is used."""
    import datasets.config
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True
    logging.getLogger("datasets").setLevel(logging.ERROR)
