"""Names of models in requests: clients of Ollama add a tag."""

from __future__ import annotations

from cacheblend_cli.server.api_errors import ApiError

_LATEST = ":latest"


def tagged(name: str) -> str:
    """Return the name with a tag, as Ollama's names always have."""
    return name if ":" in name else name + _LATEST


def check_model(own: str, name: str, kind: str = "model") -> None:
    """Raises ApiError if the name, with or without a tag, is not that of the model `own`."""
    if tagged(name) not in (tagged(own), tagged("cacheblend")):
        message = f"no such {kind}: {name[:80]!r}; this server has {own}"
        raise ApiError(404, message, param="model", code="model_not_found")
