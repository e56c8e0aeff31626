"""Interface of the engines that a prefilled prompt's KV can be handed to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cacheblend_cli.kv.export import KVReader


class Connector(Protocol):
    """Takes one prompt for an engine that continues it. One object a prompt."""

    def hand_over(self, token_ids: Sequence[int], kv: KVReader) -> None:
        """Copy the prompt's KV. Called once, in the engine's thread. token_ids: the whole prompt. kv: KV of all its
        positions, valid during the call. An error raised here fails the request."""
        ...
