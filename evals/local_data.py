"""lm-eval's tasks from local files: a folder stands for the data sets of the hub, prompts and metrics stay lm-eval's.

lm-eval asks for a data set by its id on the hub; `local_data_sets` answers from DIR instead. A file is called
NAME.SPLIT[…].jsonl (or .jsonl.gz): `arc_easy.test.jsonl`, `hellaswag.val.jsonl.gz`, `gsm8k.train-first256.jsonl`; one
without a split is a validation split. A row may have the fields of the hub's data set already, or the ones that
MosaicML's llm-foundry publishes the same items in (query, choices, gold), which are put back into the hub's form here.
"""

import contextlib
import gzip
import json
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmq.profiles.errors import InputError

Row = dict[str, Any]


@dataclass(frozen=True)
class LocalDataSet:
    """A data set of the hub: NAME of its files, a row -> the hub's row, and the field that only the hub's rows have."""

    stem: str
    adapt: Callable[[Row], Row]
    own_field: str
    only: Callable[[Row, str], bool] | None = None  # whether a row belongs to a subset of the data set


def _lettered(row: Row) -> dict[str, Any]:
    labels = list(string.ascii_uppercase[: len(row["choices"])])
    return {"choices": {"text": row["choices"], "label": labels}, "answerKey": labels[row["gold"]]}


def _arc(row: Row) -> Row:
    return {"question": row["query"].removeprefix("Question: "), **_lettered(row)}


def _openbookqa(row: Row) -> Row:
    return {"question_stem": row["query"], **_lettered(row)}


def _hellaswag(row: Row) -> Row:
    """The unfinished last sentence is the hub's ctx_b, which lm-eval capitalizes."""
    activity, _, context = row["query"].partition(": ")
    begun = context.rfind(". ") + 2
    if context[-1:] in ".!?\"'" or begun < 2:
        begun = len(context)
    return {
        "activity_label": activity,
        "ctx_a": context[:begun].rstrip(),
        "ctx_b": context[begun:],
        "endings": row["choices"],
        "label": str(row["gold"]),
    }


def _lambada(row: Row) -> Row:
    return {"text": f"{row['context']} {row['continuation']}"}


def _winogrande(row: Row) -> Row:
    """What both contexts begin with stands before the gap."""
    first, second = row["context_options"]
    shared = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))
    shared = first.rfind(" ", 0, shared + 1) + 1
    return {
        "sentence": f"{first[:shared]}_ {row['continuation']}",
        "option1": first[shared:],
        "option2": second[shared:],
        "answer": str(row["gold"] + 1),
    }


def _boolq(row: Row) -> Row:
    passage, _, question = row["query"].removeprefix("Passage: ").rpartition("\nQuestion: ")
    return {
        "passage": passage,
        "question": question.removesuffix("?"),
        "label": int(row["choices"][row["gold"]] == "yes"),
    }


def _copa(row: Row) -> Row:
    premise, _, connector = row["query"].rpartition(" ")
    first, second = row["choices"]
    return {
        "premise": f"{premise.removesuffix(',')}.",
        "question": {"because": "cause", "therefore": "effect"}[connector],
        "choice1": first,
        "choice2": second,
        "label": row["gold"],
    }


def _truthfulqa(row: Row) -> Row:
    """True answers first, as on the hub, where lm-eval's target is choice 0."""

    def targets(name: str) -> dict[str, list]:
        answers = sorted(row[name].items(), key=lambda item: -item[1])
        return {"choices": [text for text, _ in answers], "labels": [label for _, label in answers]}

    return {"question": row["question"], "mc1_targets": targets("mc1_targets"), "mc2_targets": targets("mc2_targets")}


def _as_it_is(row: Row) -> Row:
    return row


# (id on the hub, subset or None for any) -> its files
DATA_SETS: dict[tuple[str, str | None], LocalDataSet] = {
    ("allenai/ai2_arc", "ARC-Easy"): LocalDataSet("arc_easy", _arc, "answerKey"),
    ("allenai/ai2_arc", "ARC-Challenge"): LocalDataSet("arc_challenge", _arc, "answerKey"),
    ("Rowan/hellaswag", None): LocalDataSet("hellaswag", _hellaswag, "ctx_a"),
    ("EleutherAI/lambada_openai", "default"): LocalDataSet("lambada_openai", _lambada, "text"),
    ("baber/piqa", None): LocalDataSet("piqa", _as_it_is, "sol1"),
    ("allenai/winogrande", "winogrande_xl"): LocalDataSet("winogrande_xl", _winogrande, "sentence"),
    ("aps/super_glue", "boolq"): LocalDataSet("boolq", _boolq, "passage"),
    ("aps/super_glue", "copa"): LocalDataSet("copa", _copa, "premise"),
    ("allenai/openbookqa", "main"): LocalDataSet("openbookqa", _openbookqa, "answerKey"),
    ("truthfulqa/truthful_qa", "multiple_choice"): LocalDataSet("truthfulqa_mc", _truthfulqa, "choices"),
    ("openai/gsm8k", "main"): LocalDataSet("gsm8k", _as_it_is, "question"),
    ("cais/mmlu", None): LocalDataSet("mmlu", _as_it_is, "subject", only=lambda row, subset: row["subject"] == subset),
}
_SPLITS = {"val": "validation", "valid": "validation", "dev": "validation"}


@contextlib.contextmanager
def local_data_sets(folder: Path) -> Iterator[None]:
    """While open, the tasks that lm-eval loads take their data from `folder`; nothing is asked of a hub.

    Raises InputError for a data set that has no file there, naming the files that would do.
    """
    import lm_eval.api.task as lm_eval_task

    if not folder.is_dir():
        raise InputError(f"--data-dir {folder}: no such folder")
    library = lm_eval_task.datasets
    names = {name: getattr(library, name) for name in dir(library) if not name.startswith("_")}
    lm_eval_task.datasets = SimpleNamespace(
        **{
            **names,
            "__version__": library.__version__,
            "load_dataset": lambda path, name=None, **_: _load(folder, path, name),
        }
    )
    try:
        yield
    finally:
        lm_eval_task.datasets = library


def _load(folder: Path, path: str, subset: str | None) -> Any:
    from datasets import Dataset

    local = DATA_SETS.get((path, subset)) or DATA_SETS.get((path, None))
    if local is None:
        known = ", ".join(sorted({one.stem for one in DATA_SETS.values()}))
        raise InputError(f"--data-dir knows no layout of the data set {path} ({subset}); it knows those of {known}")
    splits: dict[str, list[Row]] = {}
    for file, split in _files(folder, local.stem):
        if split in splits:
            continue  # hellaswag.val-first1000 beside hellaswag.val: the whole one comes first
        rows = _rows(file, local)
        if local.only is not None:
            rows = [row for row in rows if local.only(row, subset)]
        splits[split] = rows
    if not any(splits.values()):
        wanted = f" with rows of {subset}" if local.only else ""
        raise InputError(
            f"--data-dir {folder} has no {local.stem}.SPLIT.jsonl (or .jsonl.gz){wanted}, which stands for {path}"
        )
    made = {split: Dataset.from_list(rows) for split, rows in splits.items() if rows}
    if path == "cais/mmlu" and "validation" in made:
        made["dev"] = made["validation"]
    return _Splits(made)


class _Splits(dict):
    """Splits by name; one that has no file is empty, so that what needs none of it can go on."""

    def __missing__(self, split: str) -> Any:
        return next(iter(self.values())).select([])


def _files(folder: Path, stem: str) -> list[tuple[Path, str]]:
    """(file, split), whole files before their cuts."""
    found = []
    for file in folder.iterdir():
        stem_and_split = file.name.removesuffix(".gz").removesuffix(".jsonl")
        if stem_and_split == file.name or stem_and_split.partition(".")[0] != stem:
            continue
        name, _, cut = stem_and_split.partition(".")[2].partition("-")
        found.append((bool(cut), file, _SPLITS.get(name, name) or "validation"))
    return [(file, split) for _, file, split in sorted(found)]


def _rows(file: Path, local: LocalDataSet) -> list[Row]:
    open_text = gzip.open if file.name.endswith(".gz") else open
    rows = []
    with open_text(file, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                rows.append(row if local.own_field in row else local.adapt(row))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise InputError(
                    f"{file}, line {number}: no row of {local.stem} ({type(error).__name__}: {error})"
                ) from None
    return rows
