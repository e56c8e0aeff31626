"""A converter with given omissions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from cacheblend_documents.layout import Converted, TextLayout
from cacheblend_documents.process import ConverterProcess


def leave_out(monkeypatch: pytest.MonkeyPatch, omissions: Mapping[str, Sequence[str]]) -> None:
    """Convert files as plain text from now on, with these omissions by file name."""

    def convert(self: ConverterProcess, name: str, data: bytes, cancellation: Any = None) -> Converted:
        return Converted(data.decode(), TextLayout(omissions=tuple(omissions.get(name, ()))))

    monkeypatch.setattr(ConverterProcess, "convert", convert)
