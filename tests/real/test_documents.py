"""Word recall of the converters over documents of published packages: one line a kind, and a floor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from document_recall import measured, median, sample, tenth_percentile
from real_packages import documents

from cacheblend_cli.corpus.converters.process import ConverterProcess

pytestmark = pytest.mark.real
MOST_FILES = 150  # of a kind
MEDIAN, TENTH_PERCENTILE = 0.97, 0.85
KINDS = "pdf docx docm pptx xlsx xlsm epub eml html rtf csv tsv json jsonl ipynb".split()


@pytest.fixture(scope="module")
def process() -> Iterator[ConverterProcess]:
    converters = ConverterProcess()
    yield converters
    converters.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_recall(kind: str, process: ConverterProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """Files with an omission that is said, and locked files, do not count against a kind."""
    report = measured(kind, sample(documents(f".{kind}"), MOST_FILES), process)
    if not report.measures:
        pytest.skip(f"no reference for {kind}: pdftotext (poppler-utils) and pandoc give those of .pdf and .rtf")
    with capsys.disabled():
        print(f"\n{report.line()}")
    middle, tenth = median(report.recalls), tenth_percentile(report.recalls)
    assert middle >= MEDIAN, report.worst()
    assert tenth >= TENTH_PERCENTILE, report.worst()
