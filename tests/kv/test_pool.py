"""The paged cache: blocks are conserved whatever is done to them, and paged attention is contiguous attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from decoding import decode_one_token
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.errors import DeviceError
from cacheblend_cli.kv.block_allocator import BlockAllocator
from cacheblend_cli.kv.forward import forward
from cacheblend_cli.kv.pool import KVPool, PagedSequence
from cacheblend_cli.kv.rows import packed_rows, rows_of


class AllocatorMachine(RuleBasedStateMachine):
    """Compares with a model of the owners of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(12)
        self.held: list[list[int]] = []

    @rule(count=st.integers(1, 5))
    def allocate(self, count: int) -> None:
        if count <= self.allocator.num_free:
            blocks = self.allocator.allocate(count)
            assert len(set(blocks)) == count
            assert not {b for t in self.held for b in t} & set(blocks)
            self.held.append(blocks)
        else:
            with pytest.raises(DeviceError):
                self.allocator.allocate(count)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.allocator.share(blocks)
        self.held.append(list(blocks))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.allocator.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def conserved(self) -> None:
        self.allocator.check_integrity()
        assert self.allocator.num_used == len({b for t in self.held for b in t})


TestAllocator = AllocatorMachine.TestCase


def test_blocks_are_adjacent_where_they_can_be() -> None:
    allocator = BlockAllocator(10)
    first, second, third = (allocator.allocate(2) for _ in range(3))
    allocator.free(second)
    assert allocator.allocate(3) == [6, 7, 8]  # the first adjacent run, past the hole
    allocator.free(first)
    allocator.free(third)
    allocator.check_integrity()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("pool") / "model"
    write_checkpoint(path, "mistral-window")
    return Engine.load(EngineConfig(model=str(path)))


@torch.inference_mode()
def _logits(engine: Engine, pool: KVPool, sequence: PagedSequence, ids: list[int]) -> torch.Tensor:
    rows = rows_of(engine.model.decoder, sequence, torch.arange(len(ids)), len(ids), len(ids))
    out = forward(engine.model.decoder, rows, torch.tensor(ids))
    assert out is not None
    return out


def test_paged_attention_is_contiguous_attention(engine: Engine) -> None:
    """The same tokens in adjacent and in scattered blocks: prefill and decode agree."""
    decoder, ids = engine.model.decoder, list(range(5, 55))
    pool = KVPool(decoder.spec, 16, 8, torch.float32, torch.device("cpu"))
    adjacent = pool.new_sequence(56)
    assert adjacent.contiguous_slot >= 0
    blocks = pool.allocator.allocate(9)
    scattered = PagedSequence(pool, [blocks[i] for i in (8, 2, 5, 0, 7, 3, 6)])
    assert scattered.contiguous_slot == -1
    a, b = _logits(engine, pool, adjacent, ids), _logits(engine, pool, scattered, ids)
    assert (a - b).abs().max() < 1e-5
    with torch.inference_mode():
        a1 = decode_one_token(decoder, pool, adjacent, 9, len(ids))
        b1 = decode_one_token(decoder, pool, scattered, 9, len(ids))
    assert (a1 - b1).abs().max() < 1e-5


def test_a_packed_launch_is_each_sequence_alone(engine: Engine) -> None:
    decoder = engine.model.decoder
    pool = KVPool(decoder.spec, 16, 8, torch.float32, torch.device("cpu"))
    prompts = [list(range(5, 30)), list(range(60, 67)), [9]]
    alone = [_logits(engine, pool, pool.new_sequence(len(p)), p) for p in prompts]
    sequences = [pool.new_sequence(len(p)) for p in prompts]
    parts = [(s, torch.arange(len(p)), len(p)) for s, p in zip(sequences, prompts, strict=True)]
    with torch.inference_mode():
        packed = forward(decoder, packed_rows(decoder, parts, 25), torch.tensor([i for p in prompts for i in p]))
    assert packed is not None
    assert (packed - torch.cat(alone)).abs().max() < 1e-5


def test_a_fork_copies_on_write(engine: Engine) -> None:
    decoder = engine.model.decoder
    pool = KVPool(decoder.spec, 8, 8, torch.float32, torch.device("cpu"))
    parent = pool.new_sequence(24)
    _logits(engine, pool, parent, list(range(5, 22)))
    child = parent.fork()
    assert pool.allocator.num_used == 3
    with torch.inference_mode():
        expected = decode_one_token(decoder, pool, parent, 40, 17)
        assert pool.allocator.num_used == 4  # only the block written to
        decode_one_token(decoder, pool, child, 99, 17)
        assert (decode_one_token(decoder, pool, parent, 40, 17) - expected).abs().max() < 1e-6
    parent.release()
    child.release()
    pool.allocator.check_integrity()
    assert pool.allocator.num_used == 0


def test_a_pool_that_is_too_small_says_so(engine: Engine, tmp_path: Path) -> None:
    pool = KVPool(engine.model.spec, 2, 8, torch.float32, torch.device("cpu"))
    with pytest.raises(DeviceError, match="2 "):
        pool.new_sequence(17)
