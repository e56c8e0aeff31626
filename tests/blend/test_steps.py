"""Work of a prefill, layer by layer: rows, K and V written, kernels launched."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheblend_store import ChunkStore
from checkpoints import WORDS, write_checkpoint

from cacheblend_cli.blend.policy import row_tile_of, tiled_count
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import Prefilled, prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.engine.worker import prefill as runtime_prefill
from cacheblend_cli.kv.rows import SLICE_ROWS
from cacheblend_cli.model.linear import STEADY_ROWS
from cacheblend_cli.types import AskRequest, BlendParams, LayerStatus, SamplingParams

LAYERS = 4
KERNELS = ("prefill_attention", "rope_and_cache", "rope", "load_kv", "kv_deviation")


class Counted:
    """An engine over two pages of three chunks, whose kernels tell how often they were launched and over how many
    rows."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_checkpoint(root / "model", "llama-gqa")
        self.engine = Engine.load(EngineConfig(model=str(root / "model")))
        (root / "docs").mkdir()
        for page in range(2):
            words = [WORDS[(7 * page + i) % len(WORDS)] for i in range(90)]
            (root / "docs" / f"{page}.md").write_text(" ".join(words) + "\n")
        self.store = ChunkStore.open(root / "store", mode="write")
        options = PrecomputeOptions(chunk_tokens=32, context="sink")
        self.engine.precompute(self.store, [str(root / "docs")], options, lambda event: None)
        self.keys = [m.key for m in sorted(self.store.chunks(), key=lambda m: (m.source, m.index))]
        self.launches: Counter[str] = Counter()
        self.attended: list[int] = []
        self._nested = threading.local()  # KV is loaded in threads of its own
        kernels = self.engine.model.decoder.kernels
        for name in KERNELS:
            self._count(monkeypatch, kernels, name)

    def _count(self, monkeypatch: pytest.MonkeyPatch, kernels: Any, name: str) -> None:
        plain = getattr(kernels, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._nested, "inside", False):  # the torch backend makes one kernel of others
                return plain(*args, **kwargs)
            self.launches[name] += 1
            if name == "prefill_attention":
                self.attended.append(args[0].shape[0])
            self._nested.inside = True
            try:
                return plain(*args, **kwargs)
            finally:
                self._nested.inside = False

        monkeypatch.setattr(kernels, name, counted)

    def prefill(self, blend: BlendParams) -> Prefilled:
        self.launches.clear()
        self.attended.clear()
        sampling = SamplingParams(max_tokens=1)
        request = resolve(
            self.engine.runtime, self.store, AskRequest("where does Mara work?", self.keys, blend, sampling)
        )
        return prefill(self.engine.runtime, request)


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(tmp_path, monkeypatch)


def test_a_full_prefill_computes_every_row_once(counted: Counted) -> None:
    done = counted.prefill(BlendParams(mode="full"))
    tokens = done.plan.num_tokens
    first, second = SLICE_ROWS, tokens - SLICE_ROWS
    assert counted.attended == [first] * (LAYERS - 1) + [second] * (LAYERS - 1) + [STEADY_ROWS], (
        "the last layer finishes these"
    )
    # one kernel a layer rotates q and k and writes; where only some rows go on, q is rotated by itself
    assert counted.launches["rope_and_cache"] == 2 * LAYERS
    assert counted.launches["rope"] == 1
    assert counted.launches["load_kv"] == 0


def test_reuse_computes_the_question_only(counted: Counted) -> None:
    done = counted.prefill(BlendParams(mode="reuse"))
    suffix = len(done.plan.segments[-1].token_ids)
    assert counted.attended == [suffix] * (LAYERS - 1) + [1]
    assert counted.launches["load_kv"] == LAYERS * (len(counted.keys) + 1), "every chunk and the prefix, at every layer"


def test_a_check_layer_narrows_the_rows(counted: Counted) -> None:
    done = counted.prefill(BlendParams(selector="hkvd", ratio=0.25))
    inexact, fresh = done.plan.inexact_tokens, done.plan.fresh_tokens
    chosen = -(-inexact // 4)
    assert len(done.result.chosen) == chosen
    assert counted.attended == [inexact + fresh, *[chosen + fresh] * (LAYERS - 2), 1]
    assert [r.status for r in done.result.layers] == [
        LayerStatus.PREFILL,
        LayerStatus.CHECK,
        *[LayerStatus.AFTER_CHECK] * (LAYERS - 2),
    ]
    assert [r.rows for r in done.result.layers] == [inexact + fresh] * 2 + [chosen + fresh] * (LAYERS - 2)
    assert counted.launches["kv_deviation"] == 1


@pytest.mark.parametrize("selector", ["query", "hkvd"])
def test_a_gpu_fills_its_tiles_of_rows(counted: Counted, selector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the best of the rows; a ratio of 0 still recomputes nothing."""
    assert [row_tile_of(torch.device(name)) for name in ("cuda", "cpu")] == [128, 1]
    blend = BlendParams(selector=selector, ratio=0.25)
    plain = counted.prefill(blend)
    fresh, chosen = plain.plan.fresh_tokens, set(plain.result.chosen.tolist())
    rows = len(chosen) + fresh
    for tile, expected in ((rows - 2, rows - 2), (rows + 3, rows + 3), (1 << 20, plain.plan.inexact_tokens + fresh)):
        monkeypatch.setattr(runtime_prefill, "row_tile_of", lambda device, tile=tile: tile)
        filled = counted.prefill(blend)
        found = set(filled.result.chosen.tolist())
        assert found < chosen if expected < rows else chosen < found
        assert len(found) + fresh == expected
        assert counted.attended[-2] == expected
        assert not len(counted.prefill(BlendParams(selector=selector, ratio=0.0)).result.chosen)


@pytest.mark.parametrize(
    ("count", "fresh", "rows"),
    [
        (0, 20, 20),
        (1, 20, 128),
        (110, 28, 128),
        (250, 22, 256),
        (260, 30, 384),  # the nearest would leave out 34 of 260
        (614, 68, 640),
        (639, 64, 640),
        (640, 64, 768),
        (30, 100, 128),
        (10, 125, 256),
        (1000, 45, 1045),
    ],
)
def test_rows_are_rounded_to_the_nearest_tile(count: int, fresh: int, rows: int) -> None:
    """Without leaving out much of a short prompt; none and all tokens stay as they are."""
    assert tiled_count(count, 1000, fresh, 128) + fresh == rows
    assert tiled_count(count, 1000, fresh, 1) == count


def test_the_probe_stops_where_it_has_looked(counted: Counted) -> None:
    done = counted.prefill(BlendParams(selector="query", ratio=0.25, probe_layers=(1, 2)))
    fresh, chosen = done.plan.fresh_tokens, len(done.result.chosen)
    assert counted.attended == [fresh, fresh, *[chosen + fresh] * (LAYERS - 1), 1], "layers 0 and 1, then the blend"


@torch.inference_mode()
def test_rows_that_are_not_computed_keep_their_old_kv(counted: Counted) -> None:
    """After the check layer, a row that was not chosen holds what was loaded; a chosen one what was computed."""
    reused, blended, full = (
        counted.prefill(blend)
        for blend in (
            BlendParams(mode="reuse"),
            BlendParams(selector="hkvd", ratio=0.25, correction="none"),
            BlendParams(mode="full"),
        )
    )
    candidates = [p for s in blended.plan.chunks if s.status == "blended" for p in range(s.start, s.end)]
    stale = torch.tensor(sorted(set(candidates) - set(blended.result.chosen.tolist())))
    for layer in range(2, LAYERS):
        old, new, true = (d.pool.read(layer, d.sequence.slots(stale))[0] for d in (reused, blended, full))
        assert torch.equal(old, new)
        assert not torch.equal(new, true)
        chosen = blended.result.chosen
        old, new = (d.pool.read(layer, d.sequence.slots(chosen))[0] for d in (reused, blended))
        assert (old != new).any(dim=(1, 2)).all()
