"""Small files of the user's cache: complete, private, and the same for all processes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cacheblend_cli import user_cache


@pytest.fixture(params=["links", "no links"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "no links":

        def unsupported(source: Path, target: Path) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", unsupported)
    return tmp_path / "kind" / "record"


def test_the_first_record_stays(path: Path) -> None:
    assert [user_cache.settle(path, text) for text in ("first", "second")] == ["first", "first"]
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_failed_write_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, mode: str) -> None:
        os.close(handle)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    assert user_cache.settle(path, "first") == "first"
    user_cache.keep(path, "second")
    assert list(path.parent.iterdir()) == []
