"""Blending by llama.cpp alone moves tokens as the engine's regression does."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from cacheblend_store import ChunkStore
from checkpoints import write_checkpoint

from cacheblend_cli.blend.corrections import COMMON, Regression
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import Candidates
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.kv.forward import write_kv
from cacheblend_cli.kv.rows import rows_of
from cacheblend_cli.types import AskRequest

CHUNK, KNOWN = 12, torch.tensor([1, 3, 8])


@torch.no_grad()
def test_it_is_the_engines_regression(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "study"))
    regress = importlib.import_module("llama_alone").regress
    write_checkpoint(tmp_path / "model", "llama-gqa", seed=3)
    engine = Engine.load(EngineConfig(model=str(tmp_path / "model"), device="cpu", dtype="float32", block_size=16))
    decoder, here = engine.model.decoder, torch.arange(CHUNK)
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        done = prefill(engine.runtime, resolve(engine.runtime, store, AskRequest("where does Mara work?", ())))
        layer, rows = decoder.layers[1], rows_of(decoder, done.sequence, here, CHUNK, CHUNK)
        torch.manual_seed(0)
        old, change = torch.randn(2, CHUNK, 2, 16), torch.randn(2, CHUNK, 2, 16)
        write_kv(layer, *old, rows)
        every = Candidates(here, torch.zeros_like(here), here)
        regression = Regression(Prompt(decoder, done.plan, done.sequence, done.loader), every, every.take(KNOWN))
        regression.apply(layer, *(old + change)[:, KNOWN])
        k, v = done.pool.read(1, rows.slots)
    cos, sin = rows.cos_sin(layer)
    moved = torch.cat((layer.kernels.rope(k, cos, -sin).flatten(1), v.flatten(1)), -1)
    known = torch.isin(here, KNOWN)
    rows_old, rows_change = (torch.cat((x[0].flatten(1), x[1].flatten(1)), -1) for x in (old, change))
    followed = rows_change[known]
    followed[:, :32] -= (1 - COMMON) * followed[:, :32].mean(0)
    found = regress(rows_old, rows_change[known], followed, known)
    torch.testing.assert_close(found[~known], moved[~known], atol=1e-5, rtol=1e-4)
    assert (found - rows_old)[~known].abs().max() > 0.1
