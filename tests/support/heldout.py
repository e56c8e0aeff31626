"""The held-out questions of the demo's model, drawn by their generator."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from cacheblend_cli.evaluation.samples import Sample, parse_samples

MEASURED = "bbf1f576d75f2bf52e11a357604c129a4877824cdcc464459ee0222a3a85b05d"
"""SHA-256 of the questions that figures of study/ belong to."""


def heldout_samples(limit: int | None = None) -> list[Sample]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2])
        from tools.make_handbook import heldout_lines
    lines = heldout_lines()
    assert hashlib.sha256(lines.encode()).hexdigest() == MEASURED
    return parse_samples(lines, "heldout.jsonl", limit)
