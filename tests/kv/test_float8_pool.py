"""A float8 KV pool: a quarter of the bytes of float32, the same blending, answers near to those of a full pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheblend_kernels.torch_backend import TorchBackend
from cacheblend_store import ChunkStore
from checkpoints import WORDS, write_checkpoint
from decoding import decode_one_token

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import Prefilled, prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.calibration import calibrate
from cacheblend_cli.kv.forward import forward
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.kv.rows import rows_of
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

QUESTION = "where does Mara work?"
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
FAMILIES = ["llama-gqa", "llama-yarn", "mistral-window", "qwen2", "qwen3-mqa"]


class Setup:
    """One model with a pool of each kind, and a store that both read."""

    def __init__(self, root: Path, family: str) -> None:
        write_checkpoint(root / "model", family)
        config = {"model": str(root / "model"), "block_size": 16, "device": "cpu"}
        self.plain = Engine.load(EngineConfig(**config))  # type: ignore[arg-type]
        self.float8 = Engine.load(EngineConfig(**config, kv_pool_dtype="float8_e4m3"))  # type: ignore[arg-type]
        paragraphs = [" ".join(WORDS[p % 7 : p % 7 + 9]) + f" {p}." for p in range(5)]
        (root / "a.md").write_text("\n\n".join(paragraphs) + "\n")
        self.store = ChunkStore.open(root / "store", mode="write")
        self.plain.precompute(self.store, [str(root / "a.md")], PrecomputeOptions(chunk_tokens=40), lambda event: None)
        self.keys = [m.key for m in sorted(self.store.chunks(), key=lambda m: -m.index)]

    def prefill(self, engine: Engine, blend: BlendParams) -> Prefilled:
        request = resolve(engine.runtime, self.store, AskRequest(QUESTION, self.keys[:4], blend, GREEDY))
        return prefill(engine.runtime, request, headroom=8, output_positions=lambda plan: torch.arange(plan.segments[-1].start, plan.num_tokens))  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = Setup(tmp_path_factory.mktemp(request.param), request.param)
    yield setup
    setup.store.close()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("mode", ["full", "reuse", "blend"])
def test_logits_are_near_those_of_a_full_pool(setup: Setup, mode: str) -> None:
    blend = BlendParams(mode=mode, ratio=0.4, selector="first")  # a selector that looks at no KV: the same tokens
    ours, reference = setup.prefill(setup.float8, blend), setup.prefill(setup.plain, blend)
    assert {t.dtype for t in ours.pool.tensors} == {torch.float8_e4m3fn}
    assert sum(t.nbytes for t in ours.pool.tensors) * 4 == sum(t.nbytes for t in reference.pool.tensors)
    assert 0 < distance(ours.result.logits, reference.result.logits) < 0.12


@pytest.mark.parametrize("deviation", ["k", "v", "kv"])
def test_a_check_layer_reads_the_pool_in_its_own_units(
    setup: Setup, deviation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deviations are those a full pool gives, but for what float8 rounds off."""
    seen: list[torch.Tensor] = []
    measure = TorchBackend.kv_deviation

    def kv_deviation(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(measure(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(TorchBackend, "kv_deviation", kv_deviation)
    for engine in (setup.float8, setup.plain):
        setup.prefill(engine, BlendParams(ratio=0.4, selector="hkvd", deviation=deviation))
    ours, reference = seen
    assert (ours.sum() / reference.sum() - 1).abs() < 0.5
    assert torch.corrcoef(torch.stack((ours, reference)))[0, 1] > 0.7


def test_ratio_one_is_full_prefill(setup: Setup) -> None:
    """But for the exact spans, which were collected over a full pool: they are nearer to it than a full prefill
    here."""
    full, blended = (setup.prefill(setup.float8, b) for b in (BlendParams(mode="full"), BlendParams(ratio=1.0)))
    assert distance(blended.result.logits, full.result.logits) < 0.06


def test_decoding_reads_what_prefill_wrote(setup: Setup) -> None:
    """A token decoded after n tokens is the token prefilled after them."""
    done = setup.prefill(setup.float8, BlendParams(mode="full"))
    last = done.plan.num_tokens - 1
    with torch.inference_mode():
        again = decode_one_token(
            setup.float8.model.decoder, done.pool, done.sequence, done.plan.token_ids[last], last
        )  # fmt: skip
    assert distance(again, done.result.logits[-1]) < 1e-3


@torch.inference_mode()
def test_a_shared_block_is_copied_on_write(setup: Setup) -> None:
    decoder, ids = setup.float8.model.decoder, list(range(5, 25))
    pool = KVPool.of(decoder, 8, 16)
    parent = pool.new_sequence(32)
    forward(decoder, rows_of(decoder, parent, torch.arange(20), 20, 20), torch.tensor(ids))
    child = parent.fork()
    before = decode_one_token(decoder, pool, parent, 40, 20)
    decode_one_token(decoder, pool, child, 99, 20)
    assert pool.allocator.num_used == 3
    assert torch.equal(decode_one_token(decoder, pool, parent, 40, 20), before)


def test_the_same_question_has_the_same_answer(setup: Setup) -> None:
    answers = [
        setup.float8.run_alone(setup.store, AskRequest(QUESTION, keys, BlendParams(), GREEDY)).generated_ids
        for keys in (setup.keys[:4], setup.keys[2:], setup.keys[:4])
    ]
    assert answers[0] == answers[2]


def test_nothing_of_a_prompt_saturates(setup: Setup) -> None:
    done = setup.prefill(setup.float8, BlendParams(mode="full"))
    used = torch.zeros(done.pool.allocator.num_blocks * 16, dtype=torch.bool)
    used[done.sequence.slots(torch.arange(done.plan.num_tokens))] = True
    for cache in done.pool.tensors:
        codes = cache.view(-1, *cache.shape[2:])[used].float().abs()
        assert codes.max() < 448
        assert codes.max() > 448 / 64  # and the range is used


def test_scales_are_of_every_head_and_depend_on_the_model_alone(setup: Setup) -> None:
    decoder = setup.plain.model.decoder
    first, second = (calibrate(decoder, setup.plain.runtime.template.prefix_ids, 16) for _ in range(2))
    for ours, again in ((first.k, second.k), (first.v, second.v)):
        assert len(ours) == decoder.spec.num_layers
        for a, b in zip(ours, again, strict=True):
            assert a.shape == (decoder.spec.num_kv_heads,)
            assert torch.equal(a, b)


def test_an_unknown_dtype_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="int8") as caught:
        EngineConfig(kv_pool_dtype="int8")
    assert caught.value.hint == "known: auto, float8_e4m3"
