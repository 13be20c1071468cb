"""Pieces of a long measurement that are kept as they come, so that the same command goes on where it was ended."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmq.evals.result import whole_file

Piece = dict[str, Any]


class KeptPieces:
    """A folder with a JSON file for each piece; without a folder nothing is kept."""

    def __init__(self, folder: Path | None, settings: dict[str, Any]) -> None:
        """Ends the program where the folder holds pieces of another measurement."""
        self._folder = folder
        self._measured: dict[str, Piece] = {}
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        before = self.find("settings")
        if before is None:
            self.keep("settings", settings)
        elif before != settings:
            changed = [name for name in settings | before if settings.get(name) != before.get(name)]
            sys.exit(
                f"{folder} holds pieces of a run with other {', '.join(changed)}: name another folder or remove it"
            )

    def find(self, name: str) -> Piece | None:
        path = self._path(name)
        if path is not None and path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
        return self._measured.get(name)

    def keep(self, name: str, piece: Piece) -> None:
        self._measured[name] = piece
        if (path := self._path(name)) is not None:
            with whole_file(path) as file:
                json.dump(piece, file)

    def get(self, name: str, measure: Callable[[], Piece]) -> Piece:
        """The piece of an earlier run, or measured."""
        found = self.find(name)
        if found is None:
            found = measure()
            self.keep(name, found)
        return found

    def _path(self, name: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{name}.json"
