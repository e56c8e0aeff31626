"""A converter with given omissions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cacheblend_documents
import pytest
from cacheblend_documents import Converted


def leave_out(monkeypatch: pytest.MonkeyPatch, omissions: Mapping[str, Sequence[str]]) -> None:
    """Convert files as plain text from now on, with these omissions by file name."""

    def convert(name: str, data: bytes, **_: Any) -> Converted:
        return Converted(data.decode(), omissions=tuple(omissions.get(name, ())))

    monkeypatch.setattr(cacheblend_documents, "convert", convert)
