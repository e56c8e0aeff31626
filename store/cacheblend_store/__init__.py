"""The chunk-KV store on LMDB: records, digests, one transaction per chunk. Independent of models and of torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cacheblend_store import private_files as private_files  # here, because commands without LMDB use it

if TYPE_CHECKING:
    from cacheblend_store.api import *  # noqa: F403
    from cacheblend_store.upkeep.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import the public names (api.py, upkeep/api.py) on first use."""
    if not name.startswith("_"):
        for module in ("api", "upkeep.api"):  # the second only for a name that the first lacks
            found = import_module(f"cacheblend_store.{module}")
            if hasattr(found, name):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
