"""Calibration data: texts -> token ids, each sample as long as it is: no padding exists to be mistaken for text."""

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmq.profiles import hub
from llmq.profiles.errors import InputError
from llmq.quantize.builtin_text import builtin_text

BUILTIN = "builtin"
# More text than this is never needed for a calibration; what was read is in the provenance.
MAX_TEXT_BYTES = 64 * 2**20

Record = dict[str, Any]


@dataclass(frozen=True)
class Provenance:
    """Which tokens a result was calibrated on, well enough to make them again."""

    source: str
    sha256: str  # of the text read
    text_bytes: int
    rendering: str  # "plain text, cut every 512 tokens", "one text a record", "chat template"
    bos: str
    num_texts: int  # met in the source
    num_empty: int  # of them dropped: no token
    num_truncated: int  # of the samples used: cut at seq_len
    num_samples: int
    num_tokens: int
    seq_len: int
    seed: int


@dataclass(frozen=True)
class CalibrationSet:
    samples: tuple[tuple[int, ...], ...]  # token ids; lengths differ
    provenance: Provenance

    @property
    def num_tokens(self) -> int:
        return self.provenance.num_tokens

    def as_dict(self) -> dict[str, Any]:
        return asdict(self.provenance)


@dataclass(frozen=True)
class Texts:
    """A source, read: either one stream to cut, or records to keep apart."""

    name: str
    raw: bytes
    records: list[Record] | None  # None: `raw` is one plain text


def load_calibration(
    source: str | Texts, tokenizer: Any, *, num_samples: int = 128, seq_len: int = 2048, seed: int = 0
) -> CalibrationSet:
    """Samples of at most `seq_len` tokens from `source`, at most `num_samples` of them, drawn with `seed`.

    source: as `read_texts` takes it, or what it gave.
    tokenizer: a transformers tokenizer. Where it adds a BOS to a text, every sample begins with one.
    Raises InputError for a source that is missing, malformed or holds no token.
    """
    if num_samples < 1 or seq_len < 1:
        raise InputError(f"--samples {num_samples} --seq-len {seq_len}: both must be at least 1")
    texts = read_texts(source) if isinstance(source, str) else source
    bos = _bos_ids(tokenizer)
    if texts.records is None:
        tokenized, rendering = _cut_stream(_decode(texts.name, texts.raw), tokenizer, bos, seq_len)
    else:
        tokenized, rendering = _render_records(texts, tokenizer, bos)
    usable = [ids for ids in tokenized if len(ids) > len(bos)]
    if not usable:
        raise InputError(f"calibration data {texts.name} holds no token ({len(tokenized)} texts, all empty)")
    chosen = _draw(usable, num_samples, seed)
    samples = tuple(tuple(ids[:seq_len]) for ids in chosen)
    provenance = Provenance(
        source=texts.name,
        sha256=hashlib.sha256(texts.raw).hexdigest(),
        text_bytes=len(texts.raw),
        rendering=rendering.format(seq_len=seq_len),
        bos=f"each sample begins with {list(bos)}" if bos else "none: the tokenizer adds none",
        num_texts=len(tokenized),
        num_empty=len(tokenized) - len(usable),
        num_truncated=sum(len(ids) > seq_len for ids in chosen),
        num_samples=len(samples),
        num_tokens=sum(map(len, samples)),
        seq_len=seq_len,
        seed=seed,
    )
    return CalibrationSet(samples, provenance)


def check_source(source: str) -> None:
    """Refuse in the first seconds a source that `load_calibration` could not read. Reads no text."""
    if source == BUILTIN:
        return
    path = Path(source).expanduser()
    if path.is_file():
        if path.stat().st_size == 0:
            raise InputError(f"calibration file {source} is empty")
        return
    if path.is_dir():
        raise InputError(f"--calib {source} is a folder: give a text or .jsonl file, a datasets id, or '{BUILTIN}'")
    if path.suffix in (".txt", ".jsonl", ".json", ".md") or source.startswith((".", "/", "~")) or "/" not in source:
        raise InputError(f"--calib {source}: no such file (a datasets id is ORG/NAME; '{BUILTIN}' needs no file)")
    if not hub.is_reachable():  # `datasets` itself would retry for half a minute
        raise InputError(f"--calib {source}: the hub cannot be reached. Offline, use a file or '{BUILTIN}'")


def read_texts(source: str) -> Texts:
    """The texts of "builtin"; of a .jsonl file (records of {"text"}, {"messages"} for the chat template, or {"prompt"}
    with an optional {"completion"}); of any other file, as one plain text, to be cut; or of a `datasets` id,
    ORG/NAME[:CONFIG[:SPLIT]], with the same columns as JSONL.

    Of a file this imports nothing and takes no second. Raises InputError for one that is missing or malformed.
    """
    check_source(source)
    if source == BUILTIN:
        title = f"{BUILTIN} (Python's language reference, calibration half)"
        return Texts(title, builtin_text("calibration").encode(), None)
    path = Path(source).expanduser()
    if not path.is_file():
        return _read_dataset(source)
    with open(path, "rb") as file:
        raw = file.read(min(MAX_TEXT_BYTES, path.stat().st_size))  # as much is allocated as is asked for
    if path.suffix == ".jsonl":
        return Texts(path.name, raw, list(_parse_jsonl(path, raw)))
    if path.suffix == ".json":
        return Texts(path.name, raw, _parse_json(path, raw))
    _decode(path.name, raw)  # refused here, before a tokenizer is asked
    return Texts(path.name, raw, None)


def _decode(name: str, raw: bytes) -> str:
    """UTF-8 text, without the mark that some editors put first; of one cut at MAX_TEXT_BYTES the last character may be
    missing."""
    try:
        text = raw.decode("utf-8-sig", "strict" if len(raw) < MAX_TEXT_BYTES else "ignore")
    except UnicodeDecodeError as error:
        raise InputError(f"--calib {name}: not UTF-8 text ({error.reason} at byte {error.start:,})") from None
    if (place := text.find("\0")) >= 0:
        raise InputError(f"--calib {name}: no text, it holds a NUL (character {place:,})")
    return text


def _parse_jsonl(path: Path, raw: bytes) -> Iterator[Record]:
    is_cut = len(raw) == MAX_TEXT_BYTES
    lines = _decode(path.name, raw).split("\n")
    for number, line in enumerate(lines[:-1] if is_cut else lines, 1):
        if not line.strip():
            continue
        yield _checked(f"{path}, line {number}", _value(f"{path}, line {number}", line))


def _parse_json(path: Path, raw: bytes) -> list[Record]:
    """The records of one array."""
    if len(raw) == MAX_TEXT_BYTES:
        raise InputError(f"{path}: an array as large as this is not read: give .jsonl, a record a line")
    found = _value(str(path), _decode(path.name, raw))
    if not isinstance(found, list):
        raise InputError(f"{path}: an array of records is expected, or .jsonl with a record a line, or .txt")
    return [_checked(f"{path}, record {number}", record) for number, record in enumerate(found, 1)]


def _value(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error.msg})") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply for a record") from None


def _checked(where: str, record: Any) -> Record:
    """A record that a sample can be made of."""
    if not isinstance(record, dict) or (key := _text_key(record)) is None:
        found = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise InputError(f'{where}: no "text", "messages" or "prompt" in it, but {found}')
    if key == "messages":
        if not isinstance(record[key], list) or not all(isinstance(message, dict) for message in record[key]):
            raise InputError(f'{where}: "messages" is no list of messages')
        return record
    for name in (key, "completion") if key == "prompt" and record.get("completion") is not None else (key,):
        if not isinstance(record[name], str):
            raise InputError(f'{where}: "{name}" is {type(record[name]).__name__}, a string is expected')
        try:
            record[name].encode()
        except UnicodeEncodeError:
            raise InputError(f'{where}: "{name}" holds half a character (a lone surrogate)') from None
    return record


def _read_dataset(source: str) -> Texts:
    from datasets import load_dataset

    name, _, rest = source.partition(":")
    config, _, split = rest.partition(":")
    try:
        stream = load_dataset(name, config or None, split=split or "train", streaming=True)
        records, size = [], 0
        for record in stream:
            records.append(record)
            size += len(json.dumps(record, default=str))
            if size > MAX_TEXT_BYTES // 8:
                break
    except Exception as error:  # whatever the hub client raises: it is one answer for the user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"--calib {source}: the dataset cannot be read ({reason}). Offline, use a file or '{BUILTIN}'"
        ) from None
    if not records or _text_key(records[0]) is None:
        found = sorted(records[0]) if records else "no row"
        raise InputError(f'--calib {source}: it needs a column "text", "messages" or "prompt", and has {found}')
    records = [_checked(f"--calib {source}, row {number}", record) for number, record in enumerate(records, 1)]
    return Texts(source, "\n".join(json.dumps(r, default=str) for r in records).encode(), records)


def _text_key(record: Record) -> str | None:
    return next((key for key in ("messages", "text", "prompt") if key in record), None)


def _bos_ids(tokenizer: Any) -> tuple[int, ...]:
    """What the tokenizer puts before a text by itself: usually one BOS, or nothing."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    with_special = tokenizer("a", add_special_tokens=True)["input_ids"]
    return tuple(with_special[: with_special.index(plain[0])]) if plain[0] in with_special else ()


def _cut_stream(text: str, tokenizer: Any, bos: tuple[int, ...], seq_len: int) -> tuple[list[list[int]], str]:
    ids = _encode(tokenizer, text) if text.strip() else []
    piece = max(seq_len - len(bos), 1)
    pieces = [[*bos, *ids[start : start + piece]] for start in range(0, len(ids), piece)]
    if len(pieces) > 1 and len(pieces[-1]) < seq_len:
        pieces.pop()  # the stump of a long text
    return pieces or [[]], "plain text, cut every {seq_len} tokens"


def _render_records(texts: Texts, tokenizer: Any, bos: tuple[int, ...]) -> tuple[list[list[int]], str]:
    tokenized, kinds = [], set()
    for number, record in enumerate(texts.records or [], 1):
        key = _text_key(record)
        if key is None:
            tokenized.append([])
            continue
        kinds.add("chat template" if key == "messages" else "one text a record")
        if key == "messages":
            # The template writes its own BOS where the model has one.
            where = f"{texts.name}, record {number}"
            tokenized.append(_encode(tokenizer, _render_chat(where, tokenizer, record["messages"])))
            continue
        text = record[key] if key == "text" else f"{record['prompt']}{record.get('completion') or ''}"
        tokenized.append([*bos, *_encode(tokenizer, text)] if text.strip() else [])
    return tokenized, " and ".join(sorted(kinds))


def _render_chat(name: str, tokenizer: Any, messages: Any) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f'{name} holds "messages", and the model has no chat template to render them with')
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        text.encode()
    except Exception as error:  # a template may raise anything about its messages
        raise InputError(f"{name}: the chat template refuses it ({error})") from None
    return text


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _draw(usable: list[list[int]], num_samples: int, seed: int) -> list[list[int]]:
    if len(usable) <= num_samples:
        return usable
    chosen = random.Random(seed).sample(range(len(usable)), num_samples)
    return [usable[index] for index in sorted(chosen)]


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder, read from its files alone. Raises InputError where it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error).strip().splitlines()[0]
        raise InputError(f"{folder}: its tokenizer cannot be read, and calibration needs it ({reason})") from None
