"""The shape of the package: what loads what, and what no module may contain.

The reading order itself is import-linter's (`make lint`); here its contracts are held to each
other, and what only a running interpreter or the syntax tree can tell.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "minivllm").glob("*.py"))

each_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)


def _contracts() -> list[dict]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return settings["tool"]["importlinter"]["contracts"]


@pytest.mark.parametrize("module", ["minivllm.scheduler", "minivllm.engine", "minivllm.server"])
def test_host_modules_load_without_torch(module: str) -> None:
    """Importing a host module in a fresh interpreter does not load torch."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "torch was loaded"


@pytest.mark.parametrize(
    ("wall", "first", "last"), [("Host", "errors", "core"), ("Device", "dist", "model_runner")]
)
def test_walls_cover_the_order(wall: str, first: str, last: str) -> None:
    """A wall binds every module of the reading order from its first to its last."""
    contracts = _contracts()
    order = next(c["layers"] for c in contracts if c["type"] == "layers")[::-1]
    bound = next(c["source_modules"] for c in contracts if c["name"].startswith(f"{wall} wall"))
    expected = order[order.index(first) : order.index(last) + 1]
    assert bound == [f"minivllm.{name}" for name in expected]


@each_module
def test_header(path: Path) -> None:
    """Every module opens with a docstring of at most 25 lines."""
    header = ast.get_docstring(ast.parse(path.read_text()))
    assert header, f"{path.name} has no header"
    assert len(header.splitlines()) <= 25


@each_module
def test_no_pickle(path: Path) -> None:
    """Nothing imports pickle or its kin, not even inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert not names & {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
