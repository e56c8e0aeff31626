"""Word recall of converted documents: the share of a reference's words in our text.

Words are compared as multisets, in lower case, after compatibility normalisation. Each ideograph and kana is a word.
"""

from __future__ import annotations

import re
import statistics
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cacheblend_documents.conversion import convert
from cacheblend_documents.converted import NotConverted
from cacheblend_documents.limited_process import LimitedProcess
from document_references import reference_text
from reference_sources import NoReference

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")
_LEAST_WORDS = 10  # of a reference: a share of fewer says little
_UNREADABLE = re.compile(r"password|encrypt|protected|DRM|without readable text", re.IGNORECASE)
"""Reasons to refuse a file that people can read and programs cannot: locks, and fonts without characters."""


@dataclass(frozen=True)
class Measure:
    """Recall of one file, or the reason of its refusal."""

    path: Path
    recall: float  # 0 if refused
    omissions: tuple[str, ...] = ()
    refusal: str = ""
    missing: Counter[str] = field(default_factory=Counter)

    @property
    def is_reported(self) -> bool:
        """Return whether a loss is reported: by an omission, or because programs cannot read the file."""
        return bool(self.omissions) or bool(_UNREADABLE.search(self.refusal))


@dataclass(frozen=True)
class Report:
    """Measures of the files of one kind."""

    kind: str
    measures: Sequence[Measure]
    num_without_reference: int

    @property
    def recalls(self) -> list[float]:
        """Recalls of the files without a reported loss, ascending."""
        return sorted(measure.recall for measure in self.measures if not measure.is_reported)

    def line(self) -> str:
        """Return the figures of the kind, and the reasons of refusals with their counts."""
        every = sorted(measure.recall for measure in self.measures)
        refused = Counter(reason_group(measure.refusal) for measure in self.measures if measure.refusal)
        reasons = "".join(f"; {count} {reason}" for reason, count in refused.most_common())
        return (
            f"{self.kind:5} {len(every):3} files: median {median(every):.3f}, tenth percentile {tenth_percentile(every):.3f};"
            f" without an omission said {len(self.recalls):3}: {median(self.recalls):.3f}, {tenth_percentile(self.recalls):.3f};"
            f" {self.num_without_reference} without a reference; {refused.total()} refused{reasons}"
        )

    def worst(self, most: int = 10) -> str:
        """Return the files with the lowest recalls, and some of the words that they lack."""
        files = sorted((m for m in self.measures if not m.is_reported), key=lambda measure: measure.recall)[:most]
        lines = (f"{m.recall:.3f} {m.path.name}: {m.refusal or ' '.join(list(m.missing)[:12])}" for m in files)
        return "\n".join(lines)


def measured(kind: str, paths: Iterable[Path], process: LimitedProcess) -> Report:
    """Convert the files, and compare them with their references. Files with few words in the reference are left out."""
    measures, num_without = list[Measure](), 0
    for path in paths:
        try:
            expected = words(reference_text(path))
        except NoReference:
            expected = Counter()
        if expected.total() < _LEAST_WORDS:
            num_without += 1
            continue
        try:
            converted = convert(path.name, path.read_bytes(), process=process)
        except NotConverted as no:
            measures.append(Measure(path, 0.0, refusal=no.reason, missing=expected))
            continue
        missing = expected - words(f"{converted.title}\n{converted.text}")
        recall = 1 - missing.total() / expected.total()
        measures.append(Measure(path, recall, converted.omissions, missing=missing))
    return Report(kind, measures, num_without)


def words(text: str) -> Counter[str]:
    """Count the words. Soft hyphens, zero-width characters and the mark of superscripts are dropped."""
    plain = unicodedata.normalize("NFKC", re.sub("[\u00ad\u200b\ufeff^]", "", text))
    return Counter(_WORD.findall(plain.lower()))


def sample(paths: Iterable[Path], most: int) -> list[Path]:
    """Return at most this many files, spread evenly over the sorted names."""
    ordered = sorted(paths)
    step = max(len(ordered) / most, 1)
    return [ordered[int(number * step)] for number in range(int(len(ordered) / step))]


def reason_group(reason: str) -> str:
    """Return a reason without its figures and quoted details, to count equal reasons."""
    return re.sub(r"\d+", "N", reason.split(":")[0])[:60]


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 1.0


def tenth_percentile(values: Sequence[float]) -> float:
    """Return the value a tenth of the way up the ascending values."""
    return values[len(values) // 10] if values else 1.0
