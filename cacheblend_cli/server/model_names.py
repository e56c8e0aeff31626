"""Names of models in requests: clients of Ollama add a tag."""

from __future__ import annotations

_LATEST = ":latest"


def tagged(name: str) -> str:
    """Return the name with a tag, as Ollama's names always have."""
    return name if ":" in name else name + _LATEST


def is_named(own: str, name: str) -> bool:
    """Return whether the name, with or without a tag, is that of the model `own`."""
    return tagged(name) in (tagged(own), tagged("cacheblend"))
