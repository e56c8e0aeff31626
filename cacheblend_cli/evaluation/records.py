"""One record per sample and setting, streamed to a JSON lines file from which a later run resumes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cacheblend_store.conversion import convert

from cacheblend_cli.text_files import JsonLines


@dataclass(frozen=True)
class Record:
    """Measurement of one setting on one sample. rouge_* are None without rouge-score."""

    key: str
    label: str
    sample: str
    answer: str
    prompt_tokens: int
    cached_tokens: int
    exact_tokens: int
    recomputed_tokens: int
    recompute_fraction: float
    ttft_s: float  # as in `ask`
    prefill_s: float
    # against full prefill's answer, empty or None for full prefill itself
    kl: tuple[float, ...] = ()  # one entry per token of the answer
    top1: tuple[bool, ...] = ()
    k_error: tuple[float, ...] = ()  # relative RMSE, one entry per layer
    v_error: tuple[float, ...] = ()
    attention_error: tuple[float, ...] = ()
    same_answer: bool | None = None
    f1_full: float | None = None
    rouge_full: float | None = None
    # against the references, None without any
    exact_match: bool | None = None
    f1: float | None = None
    rouge_l: float | None = None
    has_answer: bool | None = None
    tags: dict[str, Any] = field(default_factory=dict)


class RecordFile:
    """Records by key, in memory and, given a path, in a file that each is appended to when it is measured."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises UsageError."""
        self._file = None
        if path is not None:
            self._file = JsonLines(path, partial(convert, of=Record), '{"key": "', "a record of cacheblend eval")
        self._records = {record.key: record for record in (self._file.rows if self._file else ())}

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: str) -> Record | None:
        return self._records.get(key)

    def add(self, record: Record) -> None:
        self._records[record.key] = record
        if self._file is not None:
            self._file.add(asdict(record))
