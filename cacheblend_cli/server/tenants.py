"""API keys and their tenants."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cacheblend_cli.errors import UsageError
from cacheblend_cli.text_files import read_text

_NAMED = re.compile(r"([A-Za-z][\w.-]{0,63}):(.+)")
_LEAST = 8  # characters of a key


@dataclass(frozen=True)
class Tenant:
    """A group of users with chunks of its own."""

    name: str  # "" for the store's own tenant
    salt: str  # separates the KV of its chunks, see Collection.salt


class Keyring:
    """API keys and their tenants. Without keys, every request belongs to the store's own tenant, `own`."""

    def __init__(self, keys: Iterable[str], own_salt: str) -> None:
        """keys: KEY for the store's own tenant, NAME:KEY for a tenant whose salt is NAME. Raises UsageError."""
        self.own = Tenant("", own_salt)
        self._known: list[tuple[bytes, Tenant]] = []
        for text in keys:
            match = _NAMED.fullmatch(text)
            tenant, key = (Tenant(match[1], match[1]), match[2]) if match else (self.own, text)
            if len(key) < _LEAST or not key.isascii() or not key.isprintable() or " " in key:
                raise UsageError(
                    f"an API key needs at least {_LEAST} printable characters without spaces",
                    "KEY, or NAME:KEY for a tenant with KV of its own",
                )
            if tenant.salt and tenant.salt == own_salt and tenant.name:
                raise UsageError(f"tenant {tenant.name!r} has the same name as --salt", "choose another name")
            self._known.append((_digest(key), tenant))

    @property
    def is_open(self) -> bool:
        return not self._known

    @property
    def tenants(self) -> set[Tenant]:
        return {tenant for _, tenant in self._known} or {self.own}

    @property
    def has_tenants(self) -> bool:
        return any(tenant.name for _, tenant in self._known)

    def tenant_of(self, authorization: str | None) -> Tenant | None:
        """Return the tenant of an Authorization header, None if unknown. Compares all keys in constant time."""
        if self.is_open:
            return self.own
        scheme, _, key = (authorization or "").partition(" ")
        digest, found = _digest(key.strip()), None
        for known, tenant in self._known:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found if scheme.lower() == "bearer" else None


def read_keys(keys: Sequence[str], file: Path | None) -> list[str]:
    """Return the API keys of the command line and of a file, one per line. Raises NotFoundError, UsageError."""
    lines = [] if file is None else read_text(file).splitlines()
    return [*keys, *(line.strip() for line in lines if line.strip() and not line.startswith("#"))]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
