from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cacheblend_store import ChunkStore
from checkpoints import write_checkpoint

from cacheblend_cli.api import Engine, EngineConfig

PARAGRAPHS = [
    "Mara leads billing. She works in Bergen.\n\n",
    "The harbor keeps a parrot. Jonas works near the lead of billing.\n\n",
    "While Mara works, the parrot is at home in the harbor. ",
]


@dataclass(frozen=True)
class Setup:
    """A random model in fp32 and an empty store."""

    engine: Engine
    store: ChunkStore


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("eval-model") / "model"
    write_checkpoint(path, "qwen3", seed=3)
    return Engine.load(EngineConfig(model=str(path), device="cpu", dtype="float32", block_size=16))


@pytest.fixture
def setup(engine: Engine, tmp_path: Path) -> Iterator[Setup]:
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        yield Setup(engine, store)
