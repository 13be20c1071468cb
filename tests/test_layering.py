"""Imports point one way, and what must stay light never reaches torch: DESIGN's arrows, checked on the source."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent

# What each part may import of llmq, itself included. `quantize.formats` is a part of its own: a leaf.
ALLOWED = {
    "profiles": {"profiles"},
    "quantize.formats": {"quantize.formats"},
    "quantize": {"quantize", "quantize.formats", "profiles"},
    "runtime": {"runtime", "quantize.formats", "profiles"},
    "evals": {"evals", "runtime", "quantize.formats", "profiles"},
    "cli": {"cli", "evals", "quantize", "quantize.formats", "runtime", "profiles"},
}
HEAVY = ("torch", "transformers", "llmcompressor", "lm_eval", "datasets")


@cache
def modules() -> dict[str, Path]:
    """llmq.profiles.units -> its file, for every module of the packages."""
    found = {}
    for package in ("cli", "evals", "profiles", "quantize", "runtime"):
        for path in (REPOSITORY / package).rglob("*.py"):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            found[".".join(("llmq", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


def part_of(module: str) -> str:
    words = module.split(".")
    return "quantize.formats" if words[1:3] == ["quantize", "formats"] else words[1]


def imports(module: str, *, at_import: bool) -> Iterator[tuple[str, int]]:
    """(imported module, line). `at_import`: only what importing the module runs, no function bodies, no type checks."""
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if at_import and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(node)):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                # `from llmq.profiles import hub` imports a module, `from llmq.profiles.hub import download` a name.
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in modules() else node.module or "", node.lineno)
        pending.extend(ast.iter_child_nodes(node))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_every_part_is_known():
    assert {part_of(module) for module in modules() if module.count(".") > 1} <= ALLOWED.keys()
    assert len(modules()) > 40


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_point_one_way(part):
    wrong = [
        f"{modules()[module].relative_to(REPOSITORY)}:{line} imports {imported}"
        for module in modules()
        if part_of(module) == part
        for imported, line in imports(module, at_import=False)
        if imported.startswith("llmq.") and part_of(imported) not in ALLOWED[part]
    ]
    assert not wrong, "\n".join(wrong)


def test_profiles_know_no_torch():
    wrong = [
        f"{modules()[module].relative_to(REPOSITORY)}:{line} imports {imported}"
        for module in modules()
        if part_of(module) == "profiles"
        for imported, line in imports(module, at_import=False)
        if imported.split(".")[0] in HEAVY
    ]
    assert not wrong, "\n".join(wrong)


def test_formats_know_no_transformers():
    wrong = [
        f"{module}:{line}"
        for module in modules()
        if part_of(module) == "quantize.formats"
        for imported, line in imports(module, at_import=False)
        if imported.split(".")[0] in HEAVY[1:]
    ]
    assert not wrong


# The one module of the runtime that knows transformers; whoever imports it does so in a function.
LONG_TAIL = "llmq.runtime.models.transformers_decoder"


def test_the_runtime_runs_without_transformers():
    wrong = [
        f"{module}:{line} imports {imported}"
        for module in modules()
        if part_of(module) == "runtime" and module != LONG_TAIL
        for at_import in (True, False)
        for imported, line in imports(module, at_import=at_import)
        if imported.split(".")[0] in HEAVY[1:] or (at_import and imported == LONG_TAIL)
    ]
    assert not wrong, "\n".join(wrong)


def heavy_chain(module: str, seen: set[str]) -> list[str] | None:
    """The imports by which importing `module` reaches a heavy library, or None."""
    seen.add(module)
    for imported, _ in imports(module, at_import=True):
        if imported.split(".")[0] in HEAVY:
            return [module, imported]
        if imported in modules() and imported not in seen and (rest := heavy_chain(imported, seen)):
            return [module, *rest]
    return None


LIGHT = ("llmq.cli.", "llmq.profiles.", "llmq.runtime.server.", "llmq.runtime.frontend.")


def test_command_line_server_and_frontend_reach_torch_by_no_import():
    light = [module for module in modules() if module.startswith(LIGHT)]
    chains = [chain for module in light if (chain := heavy_chain(module, set()))]
    assert not chains, "\n".join(" -> ".join(chain) for chain in chains)
    assert len(light) > 20


def test_python_agrees_that_no_verb_imports_torch():
    verbs = [module for module in modules() if module.startswith("llmq.cli.")]
    script = f"import sys, importlib\nfor m in {verbs}: importlib.import_module(m)\n"
    script += f"print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
