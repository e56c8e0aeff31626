"""Dataset for the workers of a data loader. It is a separate module so that spawned workers can import it."""

from __future__ import annotations

from pathlib import Path

from cacheblend_store import ChunkStore
from small_chunks import key_of, read_chunk
from torch.utils.data import Dataset


class ChunkDataset(Dataset[int]):
    """Seeds of the first `count` small chunks. Each chunk is read and compared."""

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count = path, count
        self._store: ChunkStore | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, seed: int) -> int:
        self._store = self._store or ChunkStore.open(self.path)
        with self._store.read() as reader:
            manifest = reader.manifest(key_of(seed))
            assert manifest is not None
            return read_chunk(reader, manifest)[0]
