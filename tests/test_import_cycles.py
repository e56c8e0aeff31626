"""No module imports itself through others, imports for type checking and inside functions included."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ("study",)
"""Folders of scripts that import one another by names below the folder."""


def imports_of(package: str) -> dict[str, set[str]]:
    """Return each module's imports within the package or folder."""
    if package not in SCRIPTS:
        graph = grimp.build_graph(package)
        return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    files = {
        ".".join(path.relative_to(ROOT / package).with_suffix("").parts): path
        for path in (ROOT / package).rglob("*.py")
    }
    return {name: imported(path) & files.keys() for name, path in files.items()}


def imported(path: Path) -> set[str]:
    """Return the names that a file imports: modules, and what may be modules of a package."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize(
    "package", ["cacheblend_cli", "cacheblend_documents", "cacheblend_store", "cacheblend_kernels", *SCRIPTS]
)
def test_imports_have_no_cycle(package: str) -> None:
    imports = imports_of(package)
    assert len(imports) > 10
    assert any(imports.values())
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
