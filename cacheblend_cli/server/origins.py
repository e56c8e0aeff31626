"""Origins of browser clients that may use the server (--allow-origin)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cacheblend_cli.errors import UsageError

ANY = "*"
METHODS = ("GET", "POST", "PUT", "DELETE")
EXPOSED = ("X-Session-ID", "Retry-After", "WWW-Authenticate")
"""Headers of responses that clients may read."""
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}


def read_origins(texts: Iterable[str]) -> frozenset[str]:
    """Return origins as browsers send them: in lower case, without the scheme's default port. Raises UsageError."""
    return frozenset(_read(text.strip()) for text in texts)


def _read(text: str) -> str:
    if text == ANY:
        return text
    found = _ORIGIN.fullmatch(text.lower())
    if found is None or int(found[3] or 0) > 65535:
        hint = "write scheme://host or scheme://host:port without a path, such as https://chat.example; * allows all"
        raise UsageError(f"--allow-origin {text!r} is not an origin", hint)
    scheme, host, port = found.groups()
    return f"{scheme}://{host}" if port in (None, _DEFAULT_PORTS.get(scheme)) else f"{scheme}://{host}:{port}"
