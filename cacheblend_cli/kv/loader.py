"""What brings the stored KV of one prompt into the pool, whatever way that takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class KVLoader(ABC):
    """Loads layer by layer, ahead of compute, from when it is entered until it is left.

    num_bytes: read from the source. load_s: from the start until the last layer was there. stall_s: how long computing
    waited of that. All three are final after the last wait; on a GPU asking for seconds waits for the device.
    """

    num_bytes = 0

    @property
    def load_s(self) -> float:
        return 0.0

    @property
    def stall_s(self) -> float:
        return 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:  # noqa: B027
        """Nothing is loaded any more."""

    @abstractmethod
    def wait(self, layer: int) -> None:
        """Return when the layer's KV is in the pool for whatever is queued next. Raises BadChunk."""


class NothingToLoad(KVLoader):
    """Of a prompt that is computed as a whole."""

    def wait(self, layer: int) -> None:
        return
