"""One record per sample and setting, streamed to a JSON lines file that a later run resumes from."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from msgspec import convert

from cacheblend_cli.errors import UsageError


@dataclass(frozen=True)
class Record:
    """Measurement of one setting on one sample.

    Against full prefill (empty or None for full prefill itself): kl and top1 have one entry per token of full prefill's answer,
    starting with the first; k_error, v_error and attention_error are relative RMSEs, one per layer; same_answer, f1_full and
    rouge_full compare the answers' texts; signals: one row per token of kl, see engine/risk.py. Against the references (None
    without any): exact_match, f1, rouge_l, and likelihood, the mean log-probability in nats of the first reference's tokens. ttft_s
    as in `ask`. rouge_* are None without rouge-score.
    """

    key: str
    label: str
    sample: str
    answer: str
    prompt_tokens: int
    cached_tokens: int
    exact_tokens: int
    recomputed_tokens: int
    recompute_fraction: float
    ttft_s: float
    prefill_s: float
    kl: tuple[float, ...] = ()
    top1: tuple[bool, ...] = ()
    k_error: tuple[float, ...] = ()
    v_error: tuple[float, ...] = ()
    attention_error: tuple[float, ...] = ()
    same_answer: bool | None = None
    f1_full: float | None = None
    rouge_full: float | None = None
    exact_match: bool | None = None
    f1: float | None = None
    rouge_l: float | None = None
    likelihood: float | None = None
    tags: dict[str, Any] = field(default_factory=dict)
    signals: tuple[tuple[float, ...], ...] = ()


class RecordFile:
    """Records by key, in memory and, given a path, in a file that each is appended to when it is measured.

    An incomplete last line, from an interrupted run, is cut off. Raises UsageError for other malformed lines.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._records: dict[str, Record] = {}
        self._stream: TextIO | None = None
        if path is None:
            return
        try:
            self._read(path)
            self._stream = path.open("a", encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot use {path}: {reason}", "check the path and its permissions") from error

    def _read(self, path: Path) -> None:
        data = path.read_bytes() if path.exists() else b""
        whole, torn = data[: data.rfind(b"\n") + 1], data[data.rfind(b"\n") + 1 :]
        lines = whole.decode("utf-8").split("\n")[:-1]
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    record = convert(json.loads(line), Record)
                except ValueError as error:
                    what = f"{path}:{number} is not a record of cacheblend eval: {error}"
                    raise UsageError(what, "use another file") from error
                self._records[record.key] = record
        if torn:
            if not b'{"key": "'.startswith(torn[:9]):  # cut off only our own records
                raise UsageError(f"{path}:{len(lines) + 1} is not a record of cacheblend eval", "use another file")
            os.truncate(path, len(whole))

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: str) -> Record | None:
        return self._records.get(key)

    def add(self, record: Record) -> None:
        self._records[record.key] = record
        if self._stream is not None:
            self._stream.write(json.dumps(asdict(record)) + "\n")
            self._stream.flush()
