"""Results as JSON lines: what was done once is read, not done again."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One checkpoint of the table. `version` is of the code that made it: another version is another row."""

    model: str  # "as is" or "dithered"
    scheme: str  # a key of job.SCHEMES, or "bf16"
    method: str
    version: str
    calibration: str  # "32x512"

    @property
    def folder(self) -> str:
        parts = (self.model, self.scheme, self.method, self.version, self.calibration)
        return "-".join(parts).replace(" ", "_").replace("/", "_")


@dataclass(frozen=True)
class Total:
    """Measures over windows that were summed."""

    num_windows: int
    num_scored: int
    mean_nll: float
    mean_kl: float
    top1_agreement: float


class ResultsFile:
    """Records of two kinds: what quantizing a row took, and what each window of the text found in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.quantized: dict[Row, Record] = {}
        self.windows: dict[Row, dict[int, Record]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                self._take(Row(**record.pop("row")), record)

    def add(self, row: Row, record: Record) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"row": vars(row), **record}) + "\n")
        self._take(row, record)

    def total(self, row: Row, indices: list[int]) -> Total:
        found = [self.windows[row][index] for index in indices]
        n = sum(record["num_scored"] for record in found)
        nll, kl, same = (sum(record[key] for record in found) / n for key in ("nll", "kl", "same_top1"))
        return Total(len(found), n, nll, kl, same)

    def common_windows(self, rows: list[Row]) -> list[int]:
        """Indices that all `rows` have."""
        return sorted(set.intersection(*(set(self.windows.get(row, {})) for row in rows))) if rows else []

    def _take(self, row: Row, record: Record) -> None:
        if "window" in record:
            self.windows.setdefault(row, {})[record["window"]] = record
        else:
            self.quantized[row] = record
