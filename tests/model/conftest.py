from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cacheblend_kernels import compiled
from hub_server import BYTES, Hub, serving


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A local hub with an empty repository, and an empty cache."""
    (tmp_path / "repository").mkdir()
    with serving(tmp_path / "repository") as hub:
        constants = "huggingface_hub.constants."
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
            "DOWNLOAD_CHUNK_SIZE": BYTES,
        }.items():
            monkeypatch.setattr(constants + name, value)
        cache = str(tmp_path / "cache")
        monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", cache, raising=False)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # before the library tries again
        yield hub


@pytest.fixture
def float_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefills in float32 round no activations, so that what a file holds is compared closely: tests/kernels compare
    products in integers."""
    best = compiled._best_way
    monkeypatch.setattr(compiled, "_best_way", lambda dtype: 0 if dtype == torch.float32 else best(dtype))
