"""No module imports itself through others, imports for type checking and inside functions included."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


@pytest.mark.parametrize(
    "package", ["cacheblend_cli", "cacheblend_documents", "cacheblend_store", "cacheblend_kernels"]
)
def test_imports_have_no_cycle(package: str) -> None:
    graph = grimp.build_graph(package)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert len(imports) > 10
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
