"""The chunk-KV store on LMDB: records, digests, one transaction per chunk. Independent of models and of torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cacheblend_store.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import the public names (api.py) on first use: `private_files` is also used by commands without LMDB."""
    if not name.startswith("_"):
        api = import_module("cacheblend_store.api")
        if name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
