"""Blended prefill over precomputed chunk KV caches (CacheBlend, EuroSys'25, arXiv 2405.16444)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore as ChunkStore

    from cacheblend_cli.python_api import Added as Added
    from cacheblend_cli.python_api import Asked as Asked
    from cacheblend_cli.python_api import Engine as Engine

__version__ = "0.1.0"
__all__ = ["Added", "Asked", "ChunkStore", "Engine"]


def __getattr__(name: str) -> Any:
    """What Python programs use, imported when it is asked for: the command line does without torch."""
    if name == "ChunkStore":
        from cacheblend_store import ChunkStore

        return ChunkStore
    if name in __all__:
        from cacheblend_cli import python_api

        return getattr(python_api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
