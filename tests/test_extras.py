"""Installation hints name the place that the package was installed from."""

from __future__ import annotations

import json
from importlib import metadata

import pytest

from cacheblend_cli.extras import install_hint


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "in a clone of cacheblend: pip install '.[tier]'"),
        ({"url": "https://example.org/cacheblend.whl"}, "in a clone of cacheblend: pip install '.[tier]'"),
        ({"url": "file:///home/a%20b/cacheblend", "dir_info": {}}, "pip install '/home/a b/cacheblend[tier]'"),
        ({"url": "file:///src", "dir_info": {"editable": True}}, "pip install -e '/src[tier]'"),
    ],
)
def test_the_command_installs_from_where_the_package_came(
    origin: dict | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            return json.dumps(origin) if origin is not None and name == "direct_url.json" else None

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    assert install_hint("tier") == command
