"""What the workers of a data loader read. A module of its own, so that spawned workers can import it."""

from __future__ import annotations

from cacheblend_store import ChunkStore
from small_chunks import key_of, read_chunk
from torch.utils.data import Dataset


class ChunkDataset(Dataset[int]):
    """The seeds of the first `count` small chunks, each of which is read and compared."""

    def __init__(self, store: ChunkStore, count: int) -> None:
        self.store, self.count = store, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, seed: int) -> int:
        with self.store.read() as reader:
            manifest = reader.manifest(key_of(seed))
            assert manifest is not None
            return read_chunk(reader, manifest)[0]
