"""Optional dependencies: what is missing, and how to install it."""

from __future__ import annotations

from cacheblend_cli.errors import UsageError


def require(what: str, extra: str, *packages: str) -> None:
    """Raise UsageError if a package is not installed. what: the flag or command that needs it."""
    from importlib.util import find_spec

    if absent := [name for name in packages if find_spec(name) is None]:
        names = f"{', '.join(absent)}, which {'is' if len(absent) == 1 else 'are'} not installed"
        raise UsageError(f"{what} needs the package{'s' * (len(absent) > 1)} {names}", install_hint(extra))


def install_hint(extra: str) -> str:
    """Return the pip command that installs an extra: from the clone or file of this package, else from any clone."""
    import json
    from importlib import metadata  # slow: a tenth of the import time of a warm answer
    from urllib.parse import unquote, urlsplit

    try:
        origin = json.loads(metadata.distribution("cacheblend").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    url = urlsplit(origin.get("url", ""))
    if url.scheme != "file":
        return f"in a clone of cacheblend: pip install '.[{extra}]'"
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}'{unquote(url.path)}[{extra}]'"
