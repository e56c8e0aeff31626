"""Invariants of blending over every family, for any model, order and ratio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cacheblend_store import ChunkStore
from checkpoints import FAMILY_CONFIGS, WORDS, write_checkpoint

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.types import AskOptions, AskRequest, BlendParams, SamplingParams

FAMILIES = [*FAMILY_CONFIGS, "starcoder2", "gemma3n", "gemma4", "deepseek"]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
QUESTION = "where does Mara work?"


class Setup:
    """An engine over a random model, a store, and the keys of its chunks in document order."""

    def __init__(
        self, root: Path, family: str, context: str = "sink", kv_dtype: str = "auto", **overrides: Any
    ) -> None:
        self.reference = write_checkpoint(root / "model", family, **overrides)
        self.engine = Engine.load(EngineConfig(model=str(root / "model"), block_size=16))
        docs = root / "docs"
        docs.mkdir()
        for d in range(2):
            paragraphs = [" ".join(WORDS[(d + p) % 7 : (d + p) % 7 + 9]) + f" {d}{p}." for p in range(3)]
            (docs / f"{d}.md").write_text("\n\n".join(paragraphs) + "\n")
        self.store = ChunkStore.open(root / "store", mode="write")
        options = PrecomputeOptions(chunk_tokens=40, context=context, kv_dtype=kv_dtype)
        self.engine.precompute(self.store, [str(docs)], options, lambda event: None)
        self.kv_dtype = kv_dtype
        found = sorted(self.store.chunks(), key=lambda m: (m.source, m.index))
        self.keys = [m.key for m in found]

    def logits(
        self, keys: list[bytes], blend: BlendParams, positions: Any = None, question: str = QUESTION
    ) -> torch.Tensor:
        """fp32 logits at `positions` of the prompt (default: the last)."""
        self.engine.runtime.config = EngineConfig(kv_dtype=self.kv_dtype, block_size=16)
        request = resolve(self.engine.runtime, self.store, AskRequest(question, keys, blend, GREEDY))
        done = prefill(self.engine.runtime, request, output_positions=positions)
        done.pool.allocator.check_integrity()
        return done.result.logits


@pytest.fixture(scope="module", params=FAMILIES)
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("one"), "llama-gqa")


def suffix_positions(plan: Any) -> torch.Tensor:
    return torch.arange(plan.segments[-1].start, plan.num_tokens)


def test_full_prefill_and_decode_match_transformers(setup: Setup) -> None:
    answer = setup.engine.run_alone(
        setup.store,
        AskRequest(QUESTION, setup.keys[:3], BlendParams(mode="full"), SamplingParams(max_tokens=32, ignore_eos=True)),
    )
    ids = torch.tensor([answer.prompt_ids])
    with torch.no_grad():
        expected = setup.reference(ids).logits[0]
        ours = setup.logits(setup.keys[:3], BlendParams(mode="full"), lambda plan: torch.arange(plan.num_tokens))
        assert (ours - expected).abs().max() <= 1e-4
        whole = setup.reference(torch.tensor([answer.prompt_ids + answer.generated_ids])).logits[0]
    greedy = whole.argmax(-1)[len(answer.prompt_ids) - 1 : -1].tolist()
    assert greedy == answer.generated_ids
    assert len(greedy) == 32


@pytest.mark.parametrize(("order", "check_layer"), [([0, 1, 2], 1), ([5, 0, 3, 1], 2), ([2, 2, 4], 1)])
def test_ratio_one_is_full_prefill(setup: Setup, order: list[int], check_layer: int) -> None:
    keys = [setup.keys[i] for i in order]
    full = setup.logits(keys, BlendParams(mode="full"), suffix_positions)
    blended = setup.logits(keys, BlendParams(ratio=1.0, selector="hkvd", check_layer=check_layer), suffix_positions)
    assert (full - blended).abs().max() <= 1e-4


def test_choosing_every_token_at_a_check_layer_is_full_prefill(setup: Setup) -> None:
    """The same through the state machine: a ratio just below 1 that still rounds up to every token."""
    full = setup.logits(setup.keys[:4], BlendParams(mode="full"), suffix_positions)
    blended = setup.logits(setup.keys[:4], BlendParams(ratio=0.9999, selector="hkvd", check_layer=2), suffix_positions)
    assert (full - blended).abs().max() <= 1e-4


def test_one_chunk_needs_no_repair(setup: Setup) -> None:
    full = setup.logits(setup.keys[2:3], BlendParams(mode="full"), suffix_positions)
    reused = setup.logits(setup.keys[2:3], BlendParams(mode="reuse"), suffix_positions)
    assert (full - reused).abs().max() <= 1e-4


def test_reuse_of_several_chunks_does_differ(setup: Setup) -> None:
    """A check of the tests above: if reuse were always right, they would prove nothing."""
    full = setup.logits(setup.keys[:3], BlendParams(mode="full"), suffix_positions)
    reused = setup.logits(setup.keys[:3], BlendParams(mode="reuse"), suffix_positions)
    assert (full - reused).abs().max() > 1e-3


def test_more_repair_is_closer(llama: Setup) -> None:
    keys = llama.keys[:5]
    full = llama.logits(keys, BlendParams(mode="full"))
    errors = [float((llama.logits(keys, BlendParams(ratio=r)) - full).square().mean()) for r in (0.0, 0.5, 1.0)]
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize(
    ("ratio", "selector"),
    [
        (0.0, "hkvd"),
        (0.5, "hkvd"),
        (0.2, "first"),
        (0.5, "query"),
        (0.2, "first, regression"),
    ],
)
def test_no_row_sees_later_text(setup: Setup, ratio: float, selector: str) -> None:
    """Two prompts that differ in their last chunk only: at the same rows before it, nothing differs."""
    name, _, moved = selector.partition(", ")
    blend = BlendParams(ratio=ratio, selector=name, check_layer=1, correction=moved or "none")
    last = setup.engine.model.spec.num_layers - 1

    def cache(keys: list[bytes]) -> tuple[torch.Tensor, list[int], int]:
        request = resolve(setup.engine.runtime, setup.store, AskRequest(QUESTION, keys, blend, GREEDY))
        done = prefill(setup.engine.runtime, request)
        end = done.plan.chunks[-1].start
        k = done.pool.read_k(last, slice(0, end))
        return k.clone(), [p for p in done.result.chosen.tolist() if p < end], end

    k1, chosen1, end1 = cache([*setup.keys[:3], setup.keys[3]])
    k2, chosen2, end2 = cache([*setup.keys[:3], setup.keys[4]])
    assert end1 == end2
    first_difference = min({*chosen1} ^ {*chosen2}, default=end1)  # what is chosen may depend on all; rows may not
    assert (k1[:first_difference] - k2[:first_difference]).abs().max() < 1e-5
    assert first_difference == end1 or ratio > 0.0


def test_same_prompt_same_answer_and_the_store_is_untouched(llama: Setup) -> None:
    before = [(m.key, m.blob_digests) for m in llama.store.chunks(prefixes=True)]
    first = llama.engine.run_alone(llama.store, AskRequest(QUESTION, llama.keys[:4], BlendParams(ratio=0.3), GREEDY))
    second = llama.engine.run_alone(llama.store, AskRequest(QUESTION, llama.keys[:4], BlendParams(ratio=0.3), GREEDY))
    assert first.generated_ids == second.generated_ids
    assert first.text == second.text
    assert [(m.key, m.blob_digests) for m in llama.store.chunks(prefixes=True)] == before


def test_document_context_in_order_needs_no_repair(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "qwen3", context="document")
    full = setup.logits(setup.keys[:3], BlendParams(mode="full"), suffix_positions)
    reused = setup.logits(setup.keys[:3], BlendParams(mode="reuse"), suffix_positions)
    assert (full - reused).abs().max() <= 1e-4
    answer = setup.engine.run_alone(setup.store, AskRequest(QUESTION, setup.keys[:3], BlendParams(), GREEDY))
    assert [c.status for c in answer.chunks] == ["exact"] * 3
    moved = setup.engine.run_alone(
        setup.store, AskRequest(QUESTION, [setup.keys[1], setup.keys[0]], BlendParams(), GREEDY)
    )
    assert [c.status for c in moved.chunks] == ["blended", "blended"]


@pytest.mark.parametrize(("codec", "tolerance"), [("float8_e4m3", 0.7), ("int7", 0.5)])
def test_what_is_exact_differs_by_the_codecs_rounding(tmp_path: Path, codec: str, tolerance: float) -> None:
    setup = Setup(tmp_path, "llama-gqa", kv_dtype=codec)
    full = setup.logits(setup.keys[1:2], BlendParams(mode="full"), suffix_positions)
    reused = setup.logits(setup.keys[1:2], BlendParams(mode="reuse"), suffix_positions)
    assert (full - reused).abs().max() <= tolerance  # one chunk: only the codec's rounding


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 1, 2), (0,)])
@pytest.mark.parametrize(("selector", "codec"), [("query", "int4"), ("hkvd", "int7")])
def test_ratio_one_is_full_prefill_with_a_lossy_codec(
    tmp_path: Path, selector: str, codec: str, order: tuple[int, ...]
) -> None:
    """No stored KV is used, not even layer 0 or spans in their own context; the prefix is exact."""
    setup = Setup(tmp_path, "llama-gqa", context="document", kv_dtype=codec)
    keys = [setup.keys[i] for i in order]
    full = setup.logits(keys, BlendParams(mode="full"), suffix_positions)
    blended = setup.logits(keys, BlendParams(ratio=1.0, selector=selector), suffix_positions)
    assert (full - blended).abs().max() <= 1e-4


def test_windows_end_before_rope_changes_its_frequencies(tmp_path: Path) -> None:
    """Chunks that are collected together have one set of frequencies: that of the prompts they are exact in."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
        "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    }  # fmt: skip
    write_checkpoint(tmp_path / "model", "llama-gqa", rope_parameters=rope, max_position_embeddings=512)
    engine = Engine.load(EngineConfig(model=str(tmp_path / "model"), block_size=16))
    document = tmp_path / "long.md"
    document.write_text("\n\n".join(f"{WORDS[p]} in {WORDS[p + 2]} {p}." for p in range(14)))
    store = ChunkStore.open(tmp_path / "store", mode="write")
    engine.precompute(store, [str(document)], PrecomputeOptions(chunk_tokens=16, window=400), lambda event: None)
    keys = [m.key for m in sorted(store.chunks(), key=lambda m: m.index)][:3]
    assert sum(m.num_tokens for m in store.chunks()) > 128
    reused, full = (
        engine.run_alone(store, AskRequest("who?", keys, BlendParams(mode=m), GREEDY), AskOptions(verify=True))
        for m in ("reuse", "full")
    )
    assert [c.status for c in reused.chunks] == ["exact"] * 3
    assert reused.prompt_tokens + len(reused.generated_ids) <= 128
    assert reused.verify is not None
    assert reused.verify.kl < 1e-6
    assert reused.generated_ids == full.generated_ids


@pytest.mark.parametrize("type_", ["dynamic", "longrope", "linear"])
def test_length_dependent_rope(tmp_path: Path, type_: str) -> None:
    """dynamic and longrope change their frequencies past the original length: nothing collected below it is exact
    there."""
    half = 8
    parameters: dict[str, Any] = {"rope_type": type_, "rope_theta": 10000.0, "factor": 4.0}
    if type_ == "longrope":
        parameters |= {
            "short_factor": [1.0] * half,
            "long_factor": [2.0] * half,
            "original_max_position_embeddings": 128,
        }
    limit = {"dynamic": 128, "longrope": 512, "linear": 128}[type_]  # the factor makes 512 of it, where it counts
    setup = Setup(tmp_path, "llama-gqa", rope_parameters=parameters, max_position_embeddings=limit)
    full = setup.logits(setup.keys, BlendParams(mode="full"), suffix_positions)
    blended = setup.logits(setup.keys, BlendParams(ratio=1.0), suffix_positions)
    request = resolve(
        setup.engine.runtime, setup.store, AskRequest(QUESTION, setup.keys, BlendParams(mode="full"), GREEDY)
    )
    done = prefill(setup.engine.runtime, request)
    ids = torch.tensor([done.plan.token_ids])
    assert ids.shape[1] > 128
    with torch.no_grad():
        expected = setup.reference(ids).logits[0]
    assert (full - expected[-full.shape[0] :]).abs().max() <= 1e-4
    assert (full - blended).abs().max() <= 1e-4
    planned = setup.engine.plan_of(
        setup.engine.resolve(setup.store, AskRequest(QUESTION, setup.keys, BlendParams(), GREEDY))
    )
    answer = setup.engine.run_alone(setup.store, AskRequest(QUESTION, setup.keys, BlendParams(), GREEDY))
    assert (planned.cached_tokens, planned.exact_tokens) == (answer.cached_tokens, answer.exact_tokens)
    assert planned.kv_bytes == answer.kv_bytes_loaded
    assert (planned.exact_tokens == 0) == (type_ != "linear")


class Elsewhere:
    """Positions that are not where the model is: made on the host, and the model on a GPU."""

    def __init__(self, *positions: int) -> None:
        self._positions = torch.tensor(positions)

    def to(self, device: torch.device) -> torch.Tensor:
        return self._positions.to(device)


def test_where_logits_are_wanted_may_be_said_on_the_host(llama: Setup) -> None:
    full = BlendParams(mode="full")
    here, elsewhere = (
        llama.logits(llama.keys[:1], full, lambda _, at=at: at) for at in (torch.tensor([2, 5]), Elsewhere(2, 5))
    )
    assert torch.equal(here, elsewhere)
