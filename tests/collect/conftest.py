"""Engine of a small random model with room for several chunks."""

from __future__ import annotations

import pytest
from checkpoints import write_checkpoint

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("model") / "model"
    write_checkpoint(path, "qwen2", max_position_embeddings=1024)
    return Engine.load(EngineConfig(model=str(path), threads=1))
