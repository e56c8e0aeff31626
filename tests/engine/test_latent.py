"""A model with latent attention: pool and store hold a token's latent and position key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cacheblend_kernels.torch_backend import TorchBackend
from cacheblend_store import ChunkStore
from cacheblend_store.upkeep.verify import verify
from checkpoints import WORDS, write_checkpoint
from computed_again import differing_chunks
from engine_driver import CoreDriver, ids_of, open_stored_engine

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.events import Limits
from cacheblend_cli.errors import DeviceError, UsageError
from cacheblend_cli.kv.calibration import calibrate
from cacheblend_cli.kv.pool import KVPool, bytes_per_token
from cacheblend_cli.model import loading
from cacheblend_cli.model.description import Precision
from cacheblend_cli.model.rank_shard import check_divisible
from cacheblend_cli.types import Answer, AskRequest, BlendParams, SamplingParams

LAYERS, RANK, ROPE = 4, 32, 8
LIMITS = Limits(max_sequences=4, max_rows=40, pool_tokens=16 * 14, enable_prefix_caching=False)
LONGER = SamplingParams(max_tokens=24, ignore_eos=True)  # so long that sequences are preempted
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("latent")
    write_checkpoint(root / "model", "deepseek")
    for name in "ab":
        (root / f"{name}.md").write_text("\n\n".join(" ".join(WORDS[n : n + 9]) + f" {name}{n}." for n in range(3)))
    return root


def load(folder: Path, **config: object) -> Engine:
    return Engine.load(EngineConfig(model=str(folder / "model"), block_size=16, dtype="float32", **config))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return load(folder)


@pytest.fixture(scope="module")
def store(engine: Engine, folder: Path) -> ChunkStore:
    opened = ChunkStore.open(folder / "store", mode="write")
    precompute(engine, opened, folder)
    return opened


def precompute(engine: Engine, store: ChunkStore, folder: Path, codec: str = "exact", dry_run: bool = False) -> int:
    """Return the bytes of KV that the run reports."""
    options = PrecomputeOptions(chunk_tokens=40, context="sink", kv_dtype=codec, dry_run=dry_run)
    return engine.precompute(store, [str(folder / "a.md"), str(folder / "b.md")], options, lambda event: None).bytes


def ask(engine: Engine, store: ChunkStore, **blend: object) -> Answer:
    keys = [chunk.key for chunk in store.chunks()][:3]
    return engine.run_alone(store, AskRequest("who?", keys, BlendParams(**blend), GREEDY))  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", ["exact", "float8_e4m3", "int7", "int4"])
def test_what_is_stored_is_what_a_dry_run_says(folder: Path, tmp_path: Path, codec: str) -> None:
    engine = load(folder, kv_dtype=codec)
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        said = precompute(engine, store, folder, codec, dry_run=True)
        precompute(engine, store, folder, codec)
        chunks = list(store.chunks())
        assert len(chunks) > 2
        assert all(list(chunk.shapes) == [(1, ROPE, RANK)] * LAYERS for chunk in chunks)
        assert said == sum(chunk.num_bytes for chunk in chunks)
        if codec == "exact":
            headers = 256 * LAYERS * len(chunks)
            assert 0 < said - 4 * (RANK + ROPE) * LAYERS * sum(c.num_tokens for c in chunks) < headers
        assert not differing_chunks(engine.collection(store), store)
        assert ask(engine, store, ratio=0.3).kv_bytes_loaded > 0
        assert verify(store).ok


def test_the_pool_holds_latents_and_position_keys(engine: Engine) -> None:
    pool = KVPool.of(engine.runtime.decoder, 2, 16)
    assert {(tuple(cache.k.shape[2:]), tuple(cache.v.shape[2:])) for cache in pool.layers} == {((1, ROPE), (1, RANK))}
    per_token = bytes_per_token(engine.runtime.decoder)
    assert per_token == 4 * (RANK + ROPE) * LAYERS
    assert per_token * 2 * 16 == sum(t.numel() * t.itemsize for t in pool.tensors)
    for tensor in pool.tensors:
        tensor.normal_()
    before = [tensor[[1]].clone() for tensor in pool.tensors]
    parts = pool.swap_out([1])
    for tensor in pool.tensors:
        tensor.zero_()
    pool.swap_in([0], parts)
    assert all(torch.equal(tensor[[0]], was) for tensor, was in zip(pool.tensors, before, strict=True))


@pytest.mark.parametrize(
    ("selector", "correction"),
    [
        ("query", "regression"),
        ("hkvd", "regression"),
        ("first:2+hkvd", "none"),
        ("first:2+query", "regression"),
    ],
)
def test_every_selector_and_correction_repairs(
    engine: Engine, store: ChunkStore, selector: str, correction: str
) -> None:
    full = ask(engine, store, mode="full")
    some = ask(engine, store, ratio=0.5, selector=selector, correction=correction)
    assert 0 < some.recomputed_tokens < some.cached_tokens
    whole = ask(engine, store, ratio=1.0, selector=selector, correction=correction)
    assert whole.generated_ids == full.generated_ids


def test_deviation_kinds_of_latent_attention(engine: Engine, store: ChunkStore) -> None:
    """K is made of the position key and the latent, so they are compared together; "v" compares the latent alone."""
    both, of_k = (ask(engine, store, ratio=0.2, selector="hkvd", deviation=kind) for kind in ("kv", "k"))
    assert both.generated_ids == of_k.generated_ids
    assert both.chunks == of_k.chunks


def test_another_engine_gives_the_same_answer(engine: Engine, store: ChunkStore, folder: Path) -> None:
    first = ask(engine, store, ratio=0.3)
    cold = load(folder)
    assert ask(cold, store, ratio=0.3).generated_ids == first.generated_ids


def test_latent_answers_survive_preemption(tmp_path: Path) -> None:
    with open_stored_engine(tmp_path, "deepseek") as stored:
        questions = [
            AskRequest(
                "who?", stored.keys[n : n + 3], BlendParams(ratio=0.3, mode="full" if n == 1 else "blend"), LONGER
            )
            for n in (0, 1, 2, 0)
        ]
        alone = CoreDriver(stored, replace(LIMITS, pool_tokens=4096))
        expected = [alone.ask(question) for question in questions]
        together = CoreDriver(stored, LIMITS)
        listeners = [together.arrive(question)[0] for question in questions]
        together.run()
        assert [ids_of(listener) for listener in listeners] == expected
        assert together.core.counts.preempted > 0


def test_over_a_float8_pool_it_is_close(folder: Path, store: ChunkStore) -> None:
    engine = load(folder)
    decoder = engine.runtime.decoder
    decoder.kv_scales = calibrate(decoder, engine.runtime.template.prefix_ids, 16)
    assert bytes_per_token(decoder) == (RANK + ROPE) * LAYERS
    pool = KVPool.of(decoder, 2, 16)
    assert pool.layers[0].v.dtype == torch.float8_e4m3fn
    assert len(ask(engine, store, ratio=0.3).generated_ids) == GREEDY.max_tokens


def test_latent_kv_cannot_be_handed_over(folder: Path) -> None:
    with Engine.load(str(folder / "model"), dtype="float32", threads=1) as engine, pytest.raises(UsageError):
        engine.prefill("who?", documents=["Mara works in Bergen."])


def test_latent_models_refuse_tensor_parallelism(engine: Engine) -> None:
    with pytest.raises(UsageError):
        check_divisible(engine.model.spec, 2)


def test_a_backend_without_kernels_for_it_is_refused_and_auto_takes_torch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(TorchBackend):
        name, has_latent_attention = "other", False

    real = loading.select_backend
    monkeypatch.setattr(
        loading, "select_backend", lambda name, device: real(name, device) if name == "torch" else Other()
    )
    precision = Precision("float32")
    with pytest.raises(DeviceError) as refused:
        loading.load_model(folder / "model", "m", torch.device("cpu"), precision, "triton")
    assert "MLA" in refused.value.message
    loaded = loading.load_model(folder / "model", "m", torch.device("cpu"), precision, "auto")
    assert loaded.decoder.kernels.name == "torch"
