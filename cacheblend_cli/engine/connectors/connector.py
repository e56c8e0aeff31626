"""Interface of the engines that a prefilled prompt's KV can be handed to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from cacheblend_cli.kv.export import KVReader

T_co = TypeVar("T_co", covariant=True)


class Connector(Protocol[T_co]):
    """An engine that continues a prompt from its KV."""

    def hand_over(self, token_ids: Sequence[int], kv: KVReader) -> T_co:
        """Copy the prompt's KV, and return what the other engine continues from.

        token_ids: the whole prompt. kv: of all its positions, valid during the call. Runs in the engine's thread.
        """
        ...
