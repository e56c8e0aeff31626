"""Installation hints for optional dependencies."""

from __future__ import annotations


def install_hint(extra: str) -> str:
    """Return the pip command that installs an extra from the same checkout, file or index as this package."""
    import json
    from importlib import metadata  # slow: a tenth of the import time of a warm answer
    from urllib.parse import unquote, urlsplit

    try:
        origin = json.loads(metadata.distribution("cacheblend").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    url = urlsplit(origin.get("url", ""))
    if url.scheme != "file":
        return f"pip install 'cacheblend[{extra}]'"
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}'{unquote(url.path)}[{extra}]'"
