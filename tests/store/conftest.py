"""Fixtures of the store's torture tests."""

from __future__ import annotations

import pytest
from ledger import Ledger


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()
