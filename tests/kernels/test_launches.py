"""Every launch compiles: what the backend's methods hand to Triton is recorded as Triton sees it, and compiled from
that.

The interpreter does not know types, and `kernel_variants.py` says by hand what a launch is made of. Here the launches
themselves are asked: of each method by itself with every option it has, and of the engine from the store to the last
token.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheblend_store import ChunkStore
from checkpoints import WORDS, write_checkpoint
from kernel_references import CODECS, stored_kv, stored_layers
from torch.utils._python_dispatch import TorchDispatchMode

from cacheblend_cli.blend.corrections import Regression
from cacheblend_cli.blend.policy import BlendPolicy, policy_of
from cacheblend_cli.blend.prefill import BlendSteps, blended_prefill
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import Evidence, make_selector
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.worker.memory import warm_up
from cacheblend_cli.kv import loading
from cacheblend_cli.kv.layer_graphs import LayerGraphs
from cacheblend_cli.kv.loader import KVLoader
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.kv.staging import Staging, group_layers
from cacheblend_cli.kv.stored_prompt import StoredPrompt, layer_groups
from cacheblend_cli.prompt.plan import ChunkInput, plan_prompt
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

pytest.importorskip("triton", reason="triton is not installed")
from cacheblend_kernels import (
    AttentionMetadata,
    AttentionParams,
    LayerCache,
    Regressed,
    RegressionPrior,
    Slots,
    compiled,
)
from cacheblend_kernels.triton_backend.backend import TritonBackend
from cacheblend_kernels.triton_backend.norms import ACTIVATIONS
from kernel_variants import all_variants
from launches import Launch, recorded

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

CPU = torch.device("cpu")
FLOAT8 = torch.float8_e4m3fn
NUM_ROWS, LENGTH = 5, 2048
Call = Callable[[TritonBackend], object]


class Inputs:
    """Tensors of one model's layer over a pool of LENGTH slots. heads: query and KV heads. pairs: whether every two
    options meet, or each is there once."""

    def __init__(
        self, dtype: torch.dtype, pool_dtype: torch.dtype, heads: tuple[int, int], head_dim: int, pairs: bool = True
    ) -> None:
        self.dtype, self.heads, self.head_dim, self.pairs = dtype, heads, head_dim, pairs
        num_heads, num_kv_heads = heads
        fused = torch.zeros(LENGTH, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
        self.q, self.k, self.v = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        self.cos, self.sin = torch.zeros(2, LENGTH, head_dim)
        pools = [torch.zeros(LENGTH // 64, 64, num_kv_heads, head_dim).to(pool_dtype) for _ in range(2)]
        self.cache = LayerCache(*pools, *([torch.ones(num_kv_heads)] * 2 if pool_dtype == FLOAT8 else []))

    def metadata(self, num_rows: int, contiguous: bool) -> AttentionMetadata:
        return AttentionMetadata(
            torch.arange(LENGTH - num_rows, LENGTH),
            torch.tensor([0, num_rows], dtype=torch.int32),
            torch.arange(LENGTH // 64, dtype=torch.int32)[None],
            torch.tensor([LENGTH], dtype=torch.int32),
            contiguous_slots=(0 if contiguous else -1,),
            max_kv_len=LENGTH,
        )

    def calls(self) -> Iterator[Call]:
        """Every method, with and without whatever it may be given or not."""
        yield from self._attention()
        yield from self._cache()
        yield from self._rows()
        yield from self._correction()

    def _correction(self) -> Iterator[Call]:
        numbers = torch.zeros(2, dtype=torch.int32)
        for contiguous, window in product((False, True), (None, LENGTH)):
            meta = self.metadata(NUM_ROWS, contiguous)
            params = AttentionParams(0.1, window)
            yield lambda b, m=meta, p=params: b.attention_peaks(
                self.q[:NUM_ROWS], m.positions, self.cache, m, p, torch.zeros(LENGTH)
            )
        known = torch.zeros(NUM_ROWS, dtype=torch.int32)
        rows = Regressed(torch.arange(LENGTH), numbers, known, numbers, known.long(), LENGTH)
        prior, rotation = RegressionPrior(2.0, 0.3, (8.0, 30.0), 0.5, 0.1, 0.8), (self.cos, self.sin)
        k, v = (x[:NUM_ROWS] for x in (self.k, self.v))
        for damped in (False, True):
            yield lambda b, d=damped: b.correct_stale(k, v, self.cache, rows, rotation, prior, d)

    def _attention(self) -> Iterator[Call]:
        scale = self.head_dim**-0.5
        sinks = torch.zeros(self.heads[0])
        cases = [
            *product((False, True), (None, LENGTH), (None,), (None,)), (False, None, 30.0, None), (False, LENGTH, 30.0, None),
            (False, None, None, sinks), (True, LENGTH, None, sinks),
        ]  # fmt: skip
        cases = cases if self.pairs else [cases[0], (False, LENGTH, 30.0, None), (True, LENGTH, None, sinks)]
        layers = [(contiguous, AttentionParams(scale, *params)) for contiguous, *params in cases]
        for contiguous, params in layers:
            for num_rows in (1, NUM_ROWS, 400, LENGTH):
                meta = self.metadata(num_rows, contiguous)
                yield lambda b, m=meta, n=num_rows, p=params: b.prefill_attention(self.q[:n], self.cache, m, p)
            for length in (64, LENGTH):  # whole and split
                meta = replace(self.metadata(1, contiguous), max_kv_len=length)
                yield lambda b, m=meta, p=params: b.decode_attention(self.q[:1], self.cache, m, p)

    def _cache(self) -> Iterator[Call]:
        few = [t[:NUM_ROWS] for t in (self.q, self.k, self.v, self.cos, self.sin)]
        slots, tables = torch.arange(NUM_ROWS), few[3:]
        for q in (few[0], None):
            yield lambda b, q=q: b.rope_and_cache(q, *few[1:3], self.cache, Slots(slots, *tables))
        for x in few[:2]:
            yield lambda b, x=x: b.rope(x, *tables)
        caches = _spaced(self.cache, 2)
        for codec, first in product(CODECS, (-1, 0)) if self.pairs else zip(CODECS, (-1, 0) * 3, strict=True):
            stored = stored_kv(codec, NUM_ROWS, self.heads[1], self.head_dim, CPU)
            where, layers = Slots(slots, *tables, first), stored_layers([[stored, stored]])
            yield lambda b, stored=stored, where=where: b.load_kv(stored, self.cache, where)
            yield lambda b, layers=layers, where=where: b.load_layers(layers, caches, where)
        for kind in ("k", "v", "kv"):
            yield lambda b, kind=kind: b.kv_deviation(*few[1:3], self.cache, slots, kind)

    def _rows(self) -> Iterator[Call]:
        hidden = torch.zeros(NUM_ROWS, self.heads[0] * self.head_dim, dtype=self.dtype)
        for x in (hidden, self.q[:NUM_ROWS]):
            for weight_dtype in (self.dtype, torch.float32):
                weight = torch.ones(x.shape[-1], dtype=weight_dtype)
                yield lambda b, x=x, weight=weight: b.rms_norm(x, weight, 1e-5)
        yield lambda b: b.add_rms_norm(hidden, hidden.clone(), hidden[0], 1e-5)
        for activation in ACTIVATIONS:
            yield lambda b, activation=activation: b.act_and_mul(hidden, activation)


def _spaced(cache: LayerCache, num_layers: int) -> list[LayerCache]:
    """Pools of several layers in one allocation, as `KVPool` has them on a GPU."""
    parts = [torch.stack([cache.k] * num_layers), torch.stack([cache.v] * num_layers)]
    if cache.k_scale is not None:
        parts += [torch.ones(num_layers, -(-len(cache.k_scale) // 4) * 4)[:, : len(cache.k_scale)]] * 2
    return [LayerCache(*(part[layer] for part in parts)) for layer in range(num_layers)]


def launches_of(inputs: Inputs, arch: int) -> list[Launch]:
    with recorded(arch) as launches:
        backend = TritonBackend(CPU, arch=arch, num_sms=132)
        for call in inputs.calls():
            before = len(launches)
            call(backend)
            assert len(launches) > before
    return launches


LOWERED: set[object] = set()
"""Kinds of launches that an earlier test has put through Triton's front end."""


def lower(launches: list[Launch]) -> None:
    """One of each kind through Triton's front end. Tiles of other sizes are no other kind: types are those of the
    first."""
    tile = ("BLOCK_M", "BLOCK_N")
    kinds: dict[object, Launch] = {}
    for launch in launches:
        constants = sorted((name, value) for name, value in launch.constants.items() if name not in tile)
        kinds[launch.arch, launch.kernel.__name__, *sorted(launch.types.items()), *constants] = launch
    for kind, launch in kinds.items():
        if kind in LOWERED:
            continue
        LOWERED.add(kind)
        try:
            launch.lower()
        except Exception as error:
            raise AssertionError(f"{launch}: {error}") from error


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FEW = (
    (BF16, BF16, 128, 90, True),
    (BF16, FLOAT8, 80, 90, False),
    (FP16, FP16, 80, 80, False),
    (FP32, FP32, 128, 90, False),
)
ALL = [
    (dtype, pool, head_dim, arch, True)
    for dtype, head_dim, arch in product((BF16, FP16, FP32), (80, 128), (80, 90, 100))
    for pool in (dtype, FLOAT8)
]


@pytest.mark.parametrize(
    ("dtype", "pool_dtype", "head_dim", "arch", "pairs"),
    [*FEW, *(pytest.param(*case, marks=pytest.mark.torture) for case in ALL if case not in FEW)],
)
def test_every_method(dtype: torch.dtype, pool_dtype: torch.dtype, head_dim: int, arch: int, pairs: bool) -> None:
    lower(launches_of(Inputs(dtype, pool_dtype, (32, 8) if head_dim == 128 else (7, 1), head_dim, pairs), arch))


def sampled(launch: Launch) -> bool:
    """Whether `kernel_variants.py` is to hold it: no model with heads of 128 has soft caps or sinks, or norms of a
    dtype of their own."""
    own_weights = launch.types.get("weight_ptr") != launch.types.get("x_ptr")
    special = any(launch.types.get(name, "constexpr") != "constexpr" for name in ("soft_cap", "sinks_ptr"))
    return not special and not ("weight_ptr" in launch.types and own_weights)


def standing(launch: Launch) -> Launch:
    """As `kernel_variants.py` has it: split contexts of attention stand as 8 splits there."""
    attends = launch.kernel.__name__ in ("prefill_attention_kernel", "decode_attention_kernel")
    return (
        launch
        if launch.constants.get("SPLITS", 1) == 1 or not attends
        else replace(launch, constants={**launch.constants, "SPLITS": 8})
    )


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, FLOAT8], ids=["plain pool", "float8 pool"])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_a_models_launches_are_among_the_variants(arch: int, pool_dtype: torch.dtype) -> None:
    """What is compiled beforehand, and measured, is what runs: types, constants, alignments and options."""
    compiled = {
        (launch.key, launch.aligned)
        for v in all_variants(arch)
        for launch in [
            Launch(
                v.kernel,
                arch,
                v.signature(),
                v.constants,
                frozenset(v.kernel.arg_names[i] for i in v.aligned()),
                v.num_warps,
                v.num_stages,
            )
        ]
    }
    launches = [standing(launch) for launch in launches_of(Inputs(torch.bfloat16, pool_dtype, (32, 8), 128), arch)]
    assert {v.kernel.__name__ for v in all_variants(arch)} == {launch.kernel.__name__ for launch in launches}
    missing = {str(launch) for launch in launches if sampled(launch) and (launch.key, launch.aligned) not in compiled}
    assert not missing, "\n".join(sorted(missing))


def give_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is zeros where nothing writes to it."""

    def patched(empty: Callable[..., torch.Tensor], zeros: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        # zeros on the meta device are made by torch.empty
        return lambda *args, **more: (empty if more.get("device") == "meta" else zeros)(*args, **more)

    monkeypatch.setattr(torch, "empty", patched(torch.empty, torch.zeros))
    monkeypatch.setattr(torch, "empty_like", patched(torch.empty_like, torch.zeros_like))


@pytest.mark.default_codec
class StagingLoader(KVLoader):
    """Places zeros as a GPU's loader places a prompt's stored KV."""

    def __init__(self, stored: StoredPrompt) -> None:
        decoder, spans = stored.decoder, stored.spans
        groups = layer_groups(decoder, group_layers(decoder, spans))
        self._staging = Staging(decoder, stored.sequence, spans, stored.rope_len, groups)
        self._zeros = torch.zeros(self._staging.num_bytes, dtype=torch.uint8)
        self._groups = {group.layers[0]: group for group in groups}

    def wait(self, layer: int) -> None:
        if layer in self._groups:
            self._staging.place(self._groups[layer], self._zeros)


@pytest.mark.parametrize(
    ("family", "float8", "selector"),
    [
        ("llama-gqa", False, "query"),
        ("qwen3", False, "hkvd"),
        ("mistral-window", True, "hkvd"),
        ("qwen2", True, "query"),
    ],
)
def test_the_engine(family: str, float8: bool, selector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect, load, blend and decode: whatever way it calls the kernels in; and nothing that the warm-up has not
    launched before. Nothing runs, so every result is zero."""
    write_checkpoint(tmp_path / "model", family, num_hidden_layers=3)
    (tmp_path / "a.md").write_text("\n\n".join(" ".join(WORDS[p : p + 3]) + f" {p}." for p in range(3)) + "\n")
    give_zeros(monkeypatch)
    monkeypatch.setattr(loading, "HostLoader", StagingLoader)
    with recorded(90) as launches:
        engine = Engine.load(
            EngineConfig(
                model=str(tmp_path / "model"), device="cpu", attention_backend="triton", block_size=16, dtype="bfloat16",
                kv_pool_dtype="float8_e4m3" if float8 else "auto",
            )
        )  # fmt: skip
        with ChunkStore.open(tmp_path / "store", mode="write") as store:
            engine.precompute(store, [str(tmp_path / "a.md")], PrecomputeOptions(chunk_tokens=8), lambda event: None)
            keys = [m.key for m in sorted(store.chunks(), key=lambda m: m.index)][2::-1]
            blend = BlendParams(ratio=0.3, selector=selector)
            with recorded(90) as warmed:
                decoder = engine.model.decoder
                warm_up(decoder, KVPool.of(decoder, 8, 16))
            before = len(launches)
            answer = engine.run_alone(
                store, AskRequest("?", keys, blend, SamplingParams(max_tokens=3, ignore_eos=True))
            )
    assert len(answer.generated_ids) == 3
    assert answer.recomputed_tokens > 0
    asked = {(launch.key, launch.aligned): str(launch) for launch in launches[before:]}
    assert any(text.startswith("load_kv_kernel") and "'CODEC': 'plain'" in text for text in asked.values())
    unexpected = asked.keys() - {(launch.key, launch.aligned) for launch in warmed}
    assert not unexpected, "\n".join(asked[kind] for kind in unexpected)
    expected = {"load_kv_kernel", "prefill_attention_kernel", "decode_attention_kernel", "rope_and_cache_kernel"}
    assert {launch.kernel.__name__ for launch in launches} >= expected
    lower(launches)


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window"])
def test_graphs_launch_nothing_that_the_warm_up_has_not(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same alignment of every argument, so that no capture compiles."""
    write_checkpoint(tmp_path, family, num_hidden_layers=6)
    give_zeros(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(LayerGraphs, "_capture", lambda graphs, function: function)
    with recorded(90) as launches, torch.inference_mode():
        config = EngineConfig(model=str(tmp_path), device="cpu", attention_backend="triton", dtype="bfloat16")
        decoder = Engine.load(config).model.decoder
        pool = KVPool.of(decoder, 8, 64)
        warm_up(decoder, pool)
        warmed = {(launch.key, launch.aligned): str(launch) for launch in launches}
        graphs = pool.layer_graphs = LayerGraphs(decoder, pool, pool.allocator.allocate(1)[0])
        chunks = [ChunkInput(b"", "", (0,) * num_tokens, same_regime=False) for num_tokens in (40, 37, 51)]
        plan = plan_prompt([], chunks, [0] * 9, prefix_key=None)
        prompt = Prompt(decoder, plan, pool.new_sequence(plan.num_tokens), KVLoader())
        blended_prefill(prompt, policy_of(BlendParams(), 6, layer0_exact=True))
        del launches[:]
        assert sum(iter(graphs.capture_next, False)) == 8  # of the probe, and of corrected layers
    assert {launch.kernel.__name__ for launch in launches} >= {"change_kernel", "key_peaks_kernel"}
    unexpected = {str(launch) for launch in launches if (launch.key, launch.aligned) not in warmed}
    assert not unexpected, "\n".join(sorted(unexpected))


FREE = (
    "view",
    "reshape",
    "slice",
    "chunk",
    "split",
    "split_with_sizes",
    "transpose",
    "t",
    "select",
    "alias",
    "zeros",
    "zeros_like",
)


class Operations(TorchDispatchMode):
    """torch's own operations that would be launched on a GPU: no views, and no zeros, which stand for memory nobody
    writes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.strip("_").removeprefix("unsafe_") not in FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def launched(root: Path, num_layers: int, policy: BlendPolicy) -> Counter[str]:
    """By a blended prefill of a model of so many layers: names of kernels, and of torch's operations."""
    write_checkpoint(root / str(num_layers), "llama-gqa", num_hidden_layers=num_layers)
    with recorded(90) as launches, torch.inference_mode():
        path = str(root / str(num_layers))
        engine = Engine.load(EngineConfig(model=path, device="cpu", attention_backend="triton", dtype="float32"))
        decoder = engine.model.decoder
        plan = plan_prompt([], [ChunkInput(b"", "", (0,) * 40, same_regime=False)], [0] * 8, prefix_key=None)
        sequence = KVPool.of(decoder, 2, 64).new_sequence(plan.num_tokens)
        prompt = Prompt(decoder, plan, sequence, KVLoader())
        del launches[:]
        with Operations() as operations:
            blended_prefill(prompt, policy)
    return operations.counts + Counter(launch.kernel.__name__ for launch in launches)


LAYER = {
    "linear": 4,
    "prefill_attention_kernel": 1,
    "rope_and_cache_kernel": 1,
    "rms_norm_kernel": 2,
    "act_and_mul_kernel": 1,
}


@pytest.mark.parametrize(("selector", "ratio"), [("first", 0.2), ("hkvd", 0.2), ("all", 1.0)])
def test_a_layer_is_four_products_and_five_kernels(
    selector: str, ratio: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a layer more costs the host, whatever is chosen: rotation and cache write are one launch, and nothing is
    copied."""
    give_zeros(monkeypatch)
    monkeypatch.setattr(compiled, "multiplies", lambda dtype: False)  # weights as on a GPU
    policy = BlendPolicy(make_selector(selector), ((1, ratio),))
    few, more = (launched(tmp_path, n, policy) for n in (4, 5))
    assert more - few == LAYER
    assert not few - more


def test_a_corrected_layer_launches_eight_kernels_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many chunks are corrected."""
    give_zeros(monkeypatch)
    monkeypatch.setattr(compiled, "multiplies", lambda dtype: False)
    policy = BlendPolicy(make_selector("first"), ((1, 0.2),), correction=Regression)
    few, more = (launched(tmp_path, n, policy) for n in (4, 5))
    assert more - few == LAYER | {
        "chunk_spread_kernel": 1,
        "standardise_kernel": 1,
        "change_kernel": 1,
        "common_kernel": 1,
        "covariance_kernel": 1,
        "inverse_kernel": 1,
        "weights_kernel": 1,
        "move_stale_kernel": 1,
    }


def test_choosing_is_few_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the scores: the GPU waits for the choice, its rows, and the correction's inputs."""
    give_zeros(monkeypatch)
    choose, counts = BlendSteps.choose_before, list[int]()

    def counted(steps: BlendSteps, evidence: Evidence) -> None:
        with Operations() as operations:
            choose(steps, evidence)
        counts.append(operations.counts.total())

    monkeypatch.setattr(BlendSteps, "choose_before", counted)
    policy = BlendPolicy(make_selector("query"), ((1, 0.2),), probe_layers=(1, 2), correction=Regression)
    launched(tmp_path, 4, policy)
    assert len(counts) == 1
    assert counts[0] <= 17


def test_a_probed_layer_launches_two_kernels_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_zeros(monkeypatch)
    monkeypatch.setattr(compiled, "multiplies", lambda dtype: False)
    few, more = (
        launched(tmp_path, 6, BlendPolicy(make_selector("query"), ((1, 0.2),), probe_layers=(1, *range(2, last))))
        for last in (4, 5)
    )
    assert more - few == LAYER | {"row_lse_kernel": 1, "key_peaks_kernel": 1}
