"""Word recall of the converters over documents of published packages: one line a kind, and a floor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cacheblend_documents.conversion import converter_process
from cacheblend_documents.limited_process import LimitedProcess
from document_recall import measured, median, sample, tenth_percentile
from real_packages import documents

pytestmark = pytest.mark.real
MOST_FILES = 150  # of a kind
MEDIAN, TENTH_PERCENTILE = 0.97, 0.85
KINDS = {
    "pdf": ".pdf", "docx": ".docx .docm .dotx", "pptx": ".pptx .pptm", "xlsx": ".xlsx .xlsm .xltx", "xls": ".xls", "ods": ".ods",
    "rtf": ".rtf", "epub": ".epub", "eml": ".eml", "html": ".html .htm .xhtml", "csv": ".csv .tsv", "json": ".json .jsonl",
    "ipynb": ".ipynb",
}  # fmt: skip


@pytest.fixture(scope="module")
def process() -> Iterator[LimitedProcess]:
    process = converter_process()
    yield process
    process.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_recall(kind: str, process: LimitedProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """Files with an omission that is said, and files that programs cannot read, do not count against a kind."""
    report = measured(kind, sample(documents(KINDS[kind]), MOST_FILES), process)
    if not report.measures:
        pytest.skip(f"no reference for {kind}: poppler-utils, pandoc and catdoc give those of .pdf, .rtf and .xls")
    with capsys.disabled():
        print(f"\n{report.line()}")
    middle, tenth = median(report.recalls), tenth_percentile(report.recalls)
    assert middle >= MEDIAN, report.worst()
    assert tenth >= TENTH_PERCENTILE, report.worst()
