"""Keys of a GGUF file's metadata that describe its architecture."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cacheblend_cli.errors import UsageError

Metadata = Mapping[str, Any]


class Keys:
    """Typed keys of the file's architecture."""

    def __init__(self, metadata: Metadata, architecture: str) -> None:
        prefix = f"{architecture}."
        self.prefix = prefix
        self.values = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}

    def refuse_unknown(self, known: Collection[str]) -> None:
        for key, value in self.values.items():
            if key not in known and value not in (None, False, 0, "", "none"):
                raise self.refusal(key, "that key is not known, and it may change what the model computes")

    def refusal(self, key: str, why: str) -> UsageError:
        return UsageError(
            f"the GGUF file has {self.prefix}{key} = {self.values.get(key)!r}: {why}", "use another model"
        )

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number of 1 or more. A list with a number per layer must have the same number throughout."""
        value = self._given(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, list):
            raise self.refusal(key, "layers that differ are not implemented")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(key, "it has to be a whole number of 1 or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.refusal(key, "it has to be a number above 0")
        return float(f"{value:.7g}")  # it was a float32: 1e-05 instead of 9.999999747378752e-06

    def optional_integer(self, key: str) -> int | None:
        """Return a whole number of 1 or more; None if it is missing or 0."""
        return self.integer(key) if self.values.get(key) else None

    def _given(self, key: str, default: float | None) -> Any:
        if (value := self.values.get(key, default)) is None:
            raise UsageError(f"the GGUF file lacks {self.prefix}{key}", "fetch it again, or use another model")
        return value
