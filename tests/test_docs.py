"""Names, links and lines of the documents."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from cacheblend_cli.model.families import FAMILIES, WRAPPERS

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT, ROOT / "cacheblend_cli", ROOT / "benchmarks" / "gpu")
NAMED = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
LINK = re.compile(r"\]\(([\w./-]+\.(?:md|json|svg|png|py|cfg))?(?:#([\w-]+))?\)")
FOLDERS_OF_DOCUMENTS = (
    "",
    "docs",
    "documents",
    "study",
    "benchmarks",
    "benchmarks/gpu",
    "benchmarks/results",
    "cacheblend_cli/demo",
)
DOCUMENTS = sorted(path for folder in FOLDERS_OF_DOCUMENTS for path in (ROOT / folder).glob("*.md"))
WIDTH = 120


@cache
def defined(file: Path) -> set[str]:
    """Functions, classes, their methods and module constants of a file."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                own
                for part in node.body
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
                for own in (part.name, f"{node.name}.{part.name}")
            }
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_symbols_and_links_of_documents_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for name, symbol in NAMED.findall(text):
        files = [folder / name for folder in FOLDERS if (folder / name).is_file()]
        assert files, f"{document.name} names {name}"
        assert any(symbol in defined(file) for file in files), f"{document.name} names {symbol} of {name}"
    for link, anchor in LINK.findall(text):
        target = document.parent / link if link else document
        assert target.exists(), f"{document.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{document.name} links to {link}#{anchor}"


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [page for page in DOCUMENTS if page.name != "CHANGELOG.md"], ids=lambda p: p.name)
def test_lines_end_at_120_characters(document: Path) -> None:
    """Tables excepted. python -m tools.wrap FILE wraps a page."""
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        assert len(line) <= WIDTH or line.lstrip().startswith("|"), f"{document}:{number}"


def test_the_index_leads_to_every_page() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    links = LINK.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    assert pages - {link for link, _ in links} == {"index.md"}


def test_the_page_of_models_names_every_family() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").partition("<!-- families -->")[2]
    named = set(re.findall(r"`([\w-]+)`", page.partition("<!-- end -->")[0]))
    inside = {f"{name}_text" for name in WRAPPERS} | set(WRAPPERS)
    assert set(FAMILIES) - inside <= named


def test_architecture_names_many_symbols() -> None:
    """So that test_symbols_and_links_of_documents_exist has something to check."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(NAMED.findall(text)) > 30
