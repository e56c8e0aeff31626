"""Repair while decoding: an answer that copies a passage has the tokens it copies recomputed; where all are, nothing
changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from cacheblend_store import ChunkStore
from checkpoints import write_checkpoint
from study_modules import study_modules

from cacheblend_cli.blend.fidelity import teacher_forced
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.samples import Sample, pages
from cacheblend_cli.types import AskRequest, BlendParams


@pytest.fixture
def repair() -> Iterator[ModuleType]:
    with study_modules() as load:
        yield load("repair")


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[tuple[Engine, Request]]:
    write_checkpoint(tmp_path / "model", "qwen3", seed=3)
    engine = Engine.load(EngineConfig(model=str(tmp_path / "model"), device="cpu", dtype="float32", block_size=16))
    sample = Sample("Who?", ("Mara",), pages(["a", "b"], ["Mara leads billing.\n\n", "She works in Bergen.\n\n"]), {})
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        chunks = SampleChunks(engine, store, [sample])
        chunks.store([sample], ["sink"])
        yield engine, resolve(engine.runtime, store, AskRequest(sample.question, chunks.keys(sample, "sink")))


@torch.no_grad()
def test_copied_tokens_are_recomputed(repair: ModuleType, asked: tuple[Engine, Request]) -> None:
    engine, request = asked
    decoder = engine.runtime.decoder
    done = prefill(engine.runtime, replace(request, blend=BlendParams(mode="reuse")), headroom=8)
    stale = repair.unchosen(done).positions
    copied = [done.plan.token_ids[p] for p in stale[:6].tolist()]
    before = done.pool.layers[-1].v.flatten(0, 1)[done.sequence.slots(stale)].clone()
    logits, rows = repair.repaired(decoder, done, copied, layers=())  # copies alone
    changed = (done.pool.layers[-1].v.flatten(0, 1)[done.sequence.slots(stale)] != before).flatten(1).any(1)
    assert len(logits) == 6
    assert rows >= changed.sum() > 0
    assert changed[2:6].all()


@torch.no_grad()
def test_where_nothing_is_stale_it_is_teacher_forcing(repair: ModuleType, asked: tuple[Engine, Request]) -> None:
    engine, request = asked
    done = prefill(engine.runtime, request.in_full(), headroom=8)
    forced = teacher_forced(engine.runtime.decoder, done.sequence, done.plan.token_ids, [5, 6, 7, 8])
    logits, rows = repair.repaired(engine.runtime.decoder, done, [5, 6, 7, 8], layers=(0, 1))
    assert rows == 0
    torch.testing.assert_close(logits[1:], forced[1:], atol=1e-4, rtol=1e-4)
