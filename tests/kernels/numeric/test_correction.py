"""The backend's own regression over stale KV is the one of torch's operations (`blend/corrections.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cacheblend_kernels import LayerCache
from checkpoints import write_checkpoint

from cacheblend_cli.blend.corrections import Regression
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import Candidates
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.prompt.plan import PromptPlan, Segment

FIRST = 3  # positions before the first chunk
SIZES = {30: 9, 5: 1, 90: 70, 20: 0, 17: 17}
"""Tokens of each chunk, and how many of them are known."""
HEADS = 2


def decoder_of(root: Path, family: str, head_dim: int, device: torch.device) -> Decoder:
    path = root / f"{family}-{head_dim}"
    if not path.exists():
        write_checkpoint(path, family, num_hidden_layers=2, head_dim=head_dim)
    backend = "torch" if device.type == "cpu" and root.name == "torch" else "triton"
    config = EngineConfig(model=str(path), device=device.type, attention_backend=backend, dtype="float32")
    return Engine.load(config).model.decoder


class Case:
    """Stored K and V of five chunks at layer 1, and the fresh K and V of the known tokens."""

    def __init__(self, head_dim: int, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.num_tokens = FIRST + sum(SIZES) + 4
        self.old = torch.randn(2, self.num_tokens, HEADS, head_dim, generator=random)
        self.old[0] += 30 * torch.randn(HEADS, head_dim, generator=random)  # channels of K have offsets
        sizes = torch.tensor(list(SIZES))
        chunk = torch.arange(len(sizes)).repeat_interleave(sizes)
        offset = torch.cat([torch.arange(n) for n in SIZES])
        self.every = Candidates(torch.arange(FIRST, FIRST + len(chunk)), chunk, offset, tuple(SIZES))
        known = [torch.randperm(n, generator=random)[:count] for n, count in SIZES.items()]
        starts = sizes.cumsum(0) - sizes
        self.known = torch.cat([start + own.sort().values for start, own in zip(starts, known, strict=True)])
        self.fresh = torch.randn(2, len(self.known), HEADS, head_dim, generator=random) * 3

    def moved(
        self, decoder: Decoder, dtype: torch.dtype, scales: bool, correct: bool = True, in_graph: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of every slot of layer 1 after the correction, fp32 [num_slots, heads, head_dim], on the CPU.
        in_graph: as a CUDA graph does it, over longer tensors that were used before."""
        device = decoder.device
        pool = KVPool(decoder.own_spec, 40, 16, dtype, device)
        if scales:
            own = [torch.linspace(0.3, 0.4, HEADS, device=device), torch.linspace(0.05, 0.04, HEADS, device=device)]
            held = [torch.zeros(p.shape, dtype=torch.float8_e4m3fn, device=device) for p in (pool.layers[1].k,) * 2]
            pool.layers[1] = LayerCache(*held, *own)
        cache = pool.layers[1]
        blocks = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
        pool.allocator.allocate(40)
        sequence = type(pool.new_sequence(0))(pool, blocks[: pool.blocks_for(self.num_tokens)])
        plan = PromptPlan((Segment("chunk", 0, (0,) * self.num_tokens, "blended"),))
        prompt = Prompt(decoder, plan, sequence, KVLoader())
        rows = prompt.rows(torch.arange(self.num_tokens, device=device))
        layer = decoder.layers[1]
        k, v = self.old.to(device, dtype)
        decoder.kernels.rope_and_cache(None, k, v, cache, rows.mappings[layer.rope])
        every = Candidates(*(t.to(device) for t in (self.every.positions, self.every.chunk, self.every.offset)),
                           self.every.sizes)  # fmt: skip
        wide = torch.zeros(2, len(self.known), HEADS + 3, self.old.shape[-1], dtype=dtype, device=device)
        wide[:, :, :HEADS] = self.fresh.to(device, dtype)
        with torch.inference_mode():
            correction = Regression(prompt, every, every.take(self.known.to(device)))
            if in_graph:
                num_known, gap = len(self.known), 3
                longer = torch.full((2, num_known + 40, *wide.shape[2:]), torch.nan, dtype=dtype, device=device)
                longer[:, gap : gap + num_known] = wide
                work = correction.work(torch.arange(gap, gap + num_known, device=device))
                assert work is not None
                twin = work.twin(longer.shape[1], 4 * self.num_tokens)
                for tensor in twin._tensors:
                    tensor.fill_(10**6)  # of rows that do not exist
                work.enter(twin, rows)
                twin.apply(layer, *longer[:, :, :HEADS], pool)
            elif correct:
                correction.apply(layer, *wide[:, :, :HEADS])  # rows are strided
            found = pool.read(1, torch.arange(40 * 16, device=device))
        return found[0].cpu(), found[1].cpu()

    def stale_slots(self) -> torch.Tensor:
        """Slots of the tokens that are to be corrected."""
        blocks = torch.randperm(40, generator=torch.Generator().manual_seed(1))
        stale = torch.ones(len(self.every), dtype=torch.bool)
        stale[self.known] = False
        positions = self.every.positions[stale]
        return blocks[positions // 16] * 16 + positions % 16


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("correction")
    for name in ("torch", "triton"):
        (root / name).mkdir()
    return root / "torch", root / "triton"


@pytest.mark.parametrize(
    ("family", "head_dim", "dtype", "float8"),
    [
        ("llama-gqa", 32, torch.float32, False),
        ("llama-yarn", 16, torch.float32, False),  # RoPE's tables are stretched
        ("mistral-window", 16, torch.float32, False),  # a small V moves less
        ("llama-gqa", 24, torch.float32, False),  # halves that are padded
        ("llama-gqa", 32, torch.bfloat16, False),
        ("llama-gqa", 16, torch.float32, True),
    ],
)
def test_stale_rows_are_moved_as_by_torch(
    roots: tuple[Path, Path], device: torch.device, family: str, head_dim: int, dtype: torch.dtype, float8: bool
) -> None:
    case = Case(head_dim)
    want = case.moved(decoder_of(roots[0], family, head_dim, torch.device("cpu")), dtype, float8)
    found = case.moved(decoder_of(roots[1], family, head_dim, device), dtype, float8)
    stale = case.stale_slots()
    for got, expected, tolerance in zip(found, want, TOLERANCE[dtype, float8], strict=True):
        error = (got[stale] - expected[stale]).abs().max()
        assert error <= tolerance, error
        others = torch.ones(len(got), dtype=torch.bool)
        others[stale] = False
        kept = others & ~torch.isin(torch.arange(len(got)), known_slots(case))
        torch.testing.assert_close(got[kept], expected[kept], rtol=0, atol=tolerance, equal_nan=True)


def test_a_graph_moves_them_the_same_to_the_bit(roots: tuple[Path, Path], device: torch.device) -> None:
    case, decoder = Case(32), decoder_of(roots[1], "llama-gqa", 32, device)
    found, expected = (case.moved(decoder, torch.float32, False, in_graph=in_graph) for in_graph in (True, False))
    stale = case.stale_slots()
    assert all(torch.equal(a[stale], b[stale]) for a, b in zip(found, expected, strict=True))


def known_slots(case: Case) -> torch.Tensor:
    blocks = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    positions = case.every.positions[case.known]
    return blocks[positions // 16] * 16 + positions % 16


TOLERANCE = {  # of K, which has large offsets, and of V
    (torch.float32, False): (1e-3, 1e-4),
    (torch.bfloat16, False): (1.0, 0.15),
    (torch.float32, True): (6.0, 0.6),
}


def test_the_correction_moves_rows_substantially(roots: tuple[Path, Path]) -> None:
    case, decoder = Case(32), decoder_of(roots[0], "llama-gqa", 32, torch.device("cpu"))
    moved, still = case.moved(decoder, torch.float32, False), case.moved(decoder, torch.float32, False, correct=False)
    stale = case.stale_slots()
    assert all((a[stale] - b[stale]).abs().max() > 1 for a, b in zip(moved, still, strict=True))
