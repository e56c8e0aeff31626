"""Blended prefill over precomputed chunk KV caches (CacheBlend, EuroSys'25, arXiv 2405.16444)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cacheblend_cli.version import __version__ as __version__

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore as ChunkStore

    from cacheblend_cli.client import Client as Client
    from cacheblend_cli.engine.engine import Engine as Engine

__all__ = ["ChunkStore", "Client", "Engine"]
_HOMES = {"ChunkStore": "cacheblend_store", "Client": "cacheblend_cli.client", "Engine": "cacheblend_cli.engine.engine"}


def __getattr__(name: str) -> Any:
    """Import a class on first use, so that the command line does not import torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
