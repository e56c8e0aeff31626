"""Installation hints for optional dependencies."""

from __future__ import annotations


def install_hint(extra: str) -> str:
    """Return the pip command that installs an extra, from the checkout or file that this package was installed from."""
    import json
    from importlib import metadata  # takes a tenth of a warm answer's imports
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
