"""`--recipe FILE.toml`: settings for all linears, and others for those that patterns name.

method = "gptq"             # whatever the command line gives wins
bits = 4
group_size = 64             # or "auto", "channel"
ignore = ["layers.0"]
kv = "fp8"

[[layers]]                  # of several that name a linear the last one counts
match = "down_proj"         # or a list; patterns as of --ignore
bits = 8                    # what is not said here is as above

[[layers]]
match = ["re:.*layers\\\\.(0|29)\\\\..*"]
ignore = true               # leave in 16 bit
"""

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmq.profiles.errors import InputError
from llmq.quantize.recipe import METHODS, LinearSettings, MethodOptions, Recipe, Rule

_LINEAR_KEYS = {"method": str, "bits": int, "group_size": (int, str), "symmetric": bool, "fp8_scheme": str}
_OPTION_KEYS = {"alpha": (int, float), "damp": (int, float)}
_TOP_KEYS = {**_LINEAR_KEYS, **_OPTION_KEYS, "ignore": list, "kv": str, "format": str, "backend": str, "layers": list}
_RULE_KEYS = {**_LINEAR_KEYS, "match": (str, list), "ignore": bool}


def read_recipe_file(path: Path) -> dict[str, Any]:
    """The file's content, every key known and of the right type. Raises InputError that names the line or the key."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"--recipe {path}: no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"--recipe {path}: {error}") from None
    _check_keys(path, "", content, _TOP_KEYS)
    for number, rule in enumerate(content.get("layers", []), 1):
        where = f"[[layers]] {number}: "
        if not isinstance(rule, dict):
            raise InputError(f"--recipe {path}: {where}a table is expected")
        _check_keys(path, where, rule, _RULE_KEYS)
        if not rule.get("match"):
            raise InputError(f"--recipe {path}: {where}it has no `match`: the linears that it is for")
        if rule.get("ignore") and rule.keys() & _LINEAR_KEYS.keys():
            raise InputError(f"--recipe {path}: {where}`ignore` leaves them in 16 bit: nothing else can be set")
        if rule.keys() == {"match"}:
            raise InputError(f"--recipe {path}: {where}it sets nothing ({', '.join(_LINEAR_KEYS)} or ignore)")
    return content


def build_recipe(content: dict[str, Any], given: dict[str, Any]) -> Recipe:
    """The recipe of a file's content, overridden by what the command line gave (None: not given).

    One of them must name the method.
    """
    given = {key: value for key, value in given.items() if value is not None}
    method = given.get("method") or content["method"]
    _check_method(method)
    # The file's bits and group sizes are meant for the file's method: another one on the command line has its own.
    file_holds = content.get("method", method) == method
    merged = {**{key: value for key, value in content.items() if file_holds or key not in _LINEAR_KEYS}, **given}
    base = {key: merged[key] for key in _LINEAR_KEYS if key in merged and key != "method"}
    rules = [_rule(rule, method, base) for rule in content.get("layers", [])]
    options = {key: float(merged[key]) for key in _OPTION_KEYS if key in merged}
    return Recipe.of(
        method,
        **base,
        rules=tuple(rules),
        ignore=(*content.get("ignore", ()), *(given.get("ignore") or ())),
        options=MethodOptions(**options, smooth_only=bool(given.get("smooth_only"))),
        **{key: merged[key] for key in ("kv", "format", "backend") if key in merged},
    )


def _rule(rule: dict[str, Any], method: str, base: dict[str, Any]) -> Rule:
    patterns = (rule["match"],) if isinstance(rule["match"], str) else tuple(rule["match"])
    if rule.get("ignore"):
        return Rule(patterns, None)
    own = {key: rule[key] for key in _LINEAR_KEYS if key in rule and key != "method"}
    _check_method(rule.get("method", method))
    inherited = base if rule.get("method", method) == method else {}
    return Rule(patterns, LinearSettings.of(rule.get("method", method), **{**inherited, **own}))


def _check_method(method: str) -> None:
    if method not in METHODS:
        raise InputError(f"method {method!r}{_nearest(method, METHODS)}: one of {', '.join(METHODS)} is expected")


def _check_keys(path: Path, where: str, table: dict[str, Any], known: dict[str, Any]) -> None:
    for key, value in table.items():
        if key not in known:
            raise InputError(
                f"--recipe {path}: {where}unknown key {key!r}{_nearest(key, known)}; known are {', '.join(known)}"
            )
        wanted = known[key] if isinstance(known[key], tuple) else (known[key],)
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            words = " or ".join(kind.__name__ for kind in wanted)
            raise InputError(f"--recipe {path}: {where}{key} = {value!r}: {words} is expected")


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
