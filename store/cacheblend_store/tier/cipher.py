"""Encryption of a tier's objects with a secret shared by its users."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Any

from cacheblend_store.errors import BadBlob, TierUsage

TAG_BYTES = 16
SALT_BYTES = 16
_SHORTEST = 16


class Cipher:
    """AES-256-GCM for the parts of an object, HMAC-SHA-256 for names. Each object has its own key, derived from the
    secret and a random salt, so the number of a part is a nonce that is used once."""

    def __init__(self, secret: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise TierUsage(
                "a tier's key needs cryptography, which is not installed", "install the extra: tier"
            ) from error
        self._aead: Any = AESGCM
        self._secret = hashlib.blake2b(secret, digest_size=32, person=b"tier-secret").digest()

    @classmethod
    def of_file(cls, path: Path) -> Cipher:
        """Read the secret, without a newline at its end. Raises TierUsage if it cannot be read or is too short."""
        try:
            secret = path.read_bytes().rstrip(b"\r\n")
        except OSError as error:
            raise TierUsage(f"cannot read {path}: {error.strerror}", "make one: openssl rand -hex 32 > key") from error
        if len(secret) < _SHORTEST:
            raise TierUsage(f"the key in {path} is shorter than {_SHORTEST} bytes", "openssl rand -hex 32 > key")
        return cls(secret)

    def name(self, text: str) -> str:
        """Return the replacement of a name."""
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()[:40]

    def seal(self, salt: bytes, part: int, data: bytes | memoryview, about: bytes) -> bytes:
        """Return the encrypted part, TAG_BYTES longer. about: associated data."""
        return self._of(salt).encrypt(part.to_bytes(12, "big"), data, about)

    def open(self, salt: bytes, part: int, data: bytes | memoryview, about: bytes) -> bytes:
        """Return the plain part. Raises BadBlob if the part or its associated data was changed."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._of(salt).decrypt(part.to_bytes(12, "big"), data, about)
        except InvalidTag:
            raise BadBlob("it was changed, or encrypted with another key") from None

    def _of(self, salt: bytes) -> Any:
        key = hashlib.blake2b(salt, digest_size=32, key=self._secret, person=b"tier-object").digest()
        return self._aead(key)
