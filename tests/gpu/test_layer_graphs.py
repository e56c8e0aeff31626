"""Layers of a prefill as graphs: results of the launches one by one, with fewer launches."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engine_driver import Listener, StoredEngine
from fake_gpu import FakeGpu
from gpu_engine import Setup, capture_graphs, engine_gpu
from torch import Tensor

from cacheblend_cli.engine.async_engine import AsyncEngine
from cacheblend_cli.engine.worker.decode import make_runner
from cacheblend_cli.engine.worker.worker import Worker
from cacheblend_cli.kv import layer_graphs
from cacheblend_cli.kv.forward import FreshKV, LayerStep, LayerWork, Steps, finish, forward, layer_by_layer
from cacheblend_cli.kv.layer_graphs import LayerGraphs, row_bucket
from cacheblend_cli.kv.pool import KVPool, PagedSequence, upload
from cacheblend_cli.kv.rows import Rows, rows_of
from cacheblend_cli.model.decoder import Decoder, DecoderLayer
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

NUM_LAYERS, BLOCK_SIZE, NUM_BLOCKS = 4, 16, 40
CUDA = torch.device("cuda", 0)


@dataclass
class Bench:
    """A decoder with two pools, the first with graphs."""

    gpu: FakeGpu
    decoder: Decoder
    pool: KVPool
    plain: KVPool

    @property
    def graphs(self) -> LayerGraphs:
        assert isinstance(self.pool.layer_graphs, LayerGraphs)
        return self.pool.layer_graphs

    def rows(self, sequence: PagedSequence, num_rows: int) -> Rows:
        return rows_of(self.decoder, sequence, upload([*range(num_rows)], CUDA), num_rows, num_rows)

    def logits(self, pool: KVPool, ids: list[int], steps: Steps | None = None, scattered: bool = False) -> Tensor:
        owner = pool.new_sequence(len(ids))
        sequence = PagedSequence(pool, owner.blocks[::-1]) if scattered else owner
        found = forward(self.decoder, self.rows(sequence, len(ids)), upload(ids, CUDA), steps).cpu()
        owner.release()
        return found

    def check(self, ids: list[int], scattered: bool = False) -> None:
        found, expected = self.logits(self.pool, ids, scattered=scattered), self.logits(self.plain, ids)
        assert found == pytest.approx(expected, abs=1e-4)
        assert not self.gpu.errors

    def num(self, kind: str) -> int:
        return sum(self.gpu.found(kind).values())

    def capture(self) -> int:
        """Capture what is missing, as an idle engine does. Returns the number of captures."""
        count = 0
        while self.graphs.capture_next():
            count += 1
        return count

    @property
    def num_rows(self) -> set[int]:
        """Rows of the buckets that have graphs."""
        return {key.num_rows for key, captured in self.graphs._buckets.items() if captured.replays}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    setup = Setup.write(tmp_path, model={"num_hidden_layers": NUM_LAYERS})
    with engine_gpu() as gpu, torch.inference_mode():
        decoder = setup.engine("cuda").model.decoder
        pools = [KVPool.of(decoder, NUM_BLOCKS, BLOCK_SIZE) for _ in range(2)]  # full of NaN
        make_runner(decoder, pools[0])
        yield Bench(gpu, decoder, *pools)


def ids_of(count: int, first: int = 5) -> list[int]:
    return [5 + (first + 7 * i) % 50 for i in range(count)]


def test_a_pass_replays_what_was_captured_after_one_like_it(bench: Bench) -> None:
    bench.check(ids_of(40))
    assert bench.capture() == NUM_LAYERS - 1
    bench.check(ids_of(40))
    assert bench.num("graph replay") == NUM_LAYERS - 1
    assert bench.capture() == 0


def test_passes_capture_a_few_layers_each_if_the_engine_is_never_idle(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_graphs, "PATIENCE", 2)
    captured = []
    for _ in range(5):
        bench.check(ids_of(40))
        captured.append(bench.graphs.num_in_passes)
    assert captured == [0, 0, 1, 3, 3]
    bench.gpu.clear()
    bench.check(ids_of(40))
    assert bench.num("graph replay") == NUM_LAYERS - 1


def test_a_capture_changes_nothing(bench: Bench) -> None:
    """Between two layers of a pass, the first of which was a graph."""
    expected = bench.logits(bench.plain, ids_of(40))
    bench.logits(bench.pool, ids_of(40))
    assert bench.graphs.capture_next()
    rows = bench.rows(bench.pool.new_sequence(40), 40)
    run = layer_by_layer(bench.decoder, rows, upload(ids_of(40), CUDA), Steps())
    for _ in range(2):
        next(run)
    before = [cache.clone() for cache in bench.pool.tensors]
    assert bench.num("graph replay") == 1
    assert bench.capture() == NUM_LAYERS - 2
    for cache, held in zip(bench.pool.tensors, before, strict=True):
        changed = (cache.nan_to_num(7.0) != held.nan_to_num(7.0)).view(NUM_BLOCKS, -1).any(-1).nonzero()
        assert set(changed.flatten().tolist()) <= {0}
    hidden = finish(run)
    assert hidden is not None
    assert bench.num("graph replay") == NUM_LAYERS - 1
    assert hidden.logits(bench.decoder).cpu() == pytest.approx(expected, abs=1e-4)
    assert not bench.gpu.errors


def test_a_replayed_layer_launches_nothing_else(bench: Bench) -> None:
    launches = []
    for _ in range(2):
        bench.gpu.clear()
        bench.logits(bench.pool, ids_of(40))
        launches.append(bench.num("launch"))
        bench.capture()
    assert launches[0] >= 5 * NUM_LAYERS
    assert launches[1] == launches[0] - 5 * (NUM_LAYERS - 1)  # two norms, RoPE, attention, activation


def test_other_prompts_of_a_bucket_replay_its_graphs(bench: Bench) -> None:
    for count, first in ((40, 5), (64, 1), (33, 9), (1, 3), (50, 2)):
        bench.check(ids_of(count, first), scattered=count == 33)
        assert bench.capture() == (NUM_LAYERS - 1 if count == 40 else 0)
    for _ in range(2):
        bench.check(ids_of(100))
        bench.check(ids_of(41))
        bench.capture()
    assert bench.num_rows == {64, 128}


def test_rows_over_a_shared_prefix(bench: Bench) -> None:
    """The second sequence has the first's blocks, and computes what follows."""
    ids = ids_of(32)
    for first in (1, 2, 3):
        ends = []
        for pool in (bench.pool, bench.plain):
            sequence = pool.new_sequence(32)
            for start, tokens in ((0, ids), (32, ids_of(20, first))):
                if start:
                    sequence = PagedSequence(pool, [*sequence.blocks, *pool.allocator.allocate(2)])
                positions = upload([*range(start, start + len(tokens))], CUDA)
                length = start + len(tokens)
                rows = rows_of(bench.decoder, sequence, positions, length, length)
                out = forward(bench.decoder, rows, upload(tokens, CUDA)).cpu()
            ends.append(out)
        bench.capture()
        assert ends[0] == pytest.approx(ends[1], abs=1e-4)
    assert bench.num("graph replay") > 0
    assert not bench.gpu.errors


def test_passes_that_alternate_keep_their_activations(bench: Bench) -> None:
    """Two of one bucket and one of another, a layer each in turn."""
    prompts = [ids_of(40), ids_of(45, 9), ids_of(100, 3)]
    expected = [bench.logits(bench.plain, ids) for ids in prompts]
    for ids in prompts:
        bench.logits(bench.pool, ids)
    bench.capture()
    bench.gpu.clear()
    passes = [
        layer_by_layer(
            bench.decoder, bench.rows(bench.pool.new_sequence(len(ids)), len(ids)), upload(ids, CUDA), Steps()
        )
        for ids in prompts
    ]
    for _ in range(NUM_LAYERS - 1):
        for each in passes:
            next(each)
    for each, logits in zip(passes, expected, strict=True):
        hidden = finish(each)
        assert hidden is not None
        assert hidden.logits(bench.decoder).cpu() == pytest.approx(logits, abs=1e-4)
    assert bench.num("graph replay") == (NUM_LAYERS - 1) * len(prompts)
    assert not bench.gpu.errors


class Summed(LayerWork):
    """Sum of the queries of all layers."""

    key = "sum"

    def __init__(self, total: Tensor, weights: Tensor) -> None:
        self.total, self._weights = total, weights

    def queries(self, layer: DecoderLayer, q: Tensor, rows: Rows) -> None:
        self.total += (q.flatten(1).nan_to_num() * self._weights[: len(q), None]).sum()

    def twin(self, num_rows: int, context: int) -> Summed:
        return Summed(torch.zeros_like(self.total), torch.zeros(num_rows, device=CUDA))

    def reset(self) -> None:
        self._weights.zero_()

    def enter(self, twin: Summed, rows: Rows) -> None:
        twin.reset()
        twin._weights[: len(rows)].fill_(1)
        twin.total.copy_(self.total)
        self.total = twin.total

    def leave(self) -> None:
        self.total = self.total.clone()


class Summing(Steps):
    def __init__(self) -> None:
        self._work = Summed(torch.zeros((), device=CUDA), torch.ones(100, device=CUDA))

    @property
    def total(self) -> float:
        return float(self._work.total)

    def queries(self, layer: DecoderLayer, q: Tensor, rows: Rows) -> None:
        self._work.queries(layer, q, rows)

    def work(self, layer: DecoderLayer) -> LayerWork:
        return self._work


def test_passes_that_alternate_keep_what_their_work_found(bench: Bench) -> None:
    prompts, steps, expected = [ids_of(40), ids_of(45, 9)], [Summing(), Summing()], [Summing(), Summing()]
    for ids, own in zip(prompts, expected, strict=True):
        bench.logits(bench.plain, ids, own)
    bench.logits(bench.pool, ids_of(50), Summing())
    bench.capture()
    passes = [
        layer_by_layer(bench.decoder, bench.rows(bench.pool.new_sequence(len(ids)), len(ids)), upload(ids, CUDA), own)
        for ids, own in zip(prompts, steps, strict=True)
    ]
    for _ in range(NUM_LAYERS - 1):
        for each in passes:
            next(each)
    for each in passes:
        finish(each)
    assert bench.num("graph replay") == (NUM_LAYERS - 1) * len(prompts)
    assert [own.total for own in steps] == pytest.approx([own.total for own in expected], rel=1e-4)
    assert not bench.gpu.errors


def test_the_end_of_a_pass_is_its_own(bench: Bench) -> None:
    """What a pass returns is not overwritten by the next one."""
    bench.logits(bench.pool, ids_of(40))
    bench.capture()
    rows = bench.rows(bench.pool.new_sequence(40), 40)
    hidden = finish(layer_by_layer(bench.decoder, rows, upload(ids_of(40), CUDA), Steps()))
    bench.logits(bench.pool, ids_of(40, 8))
    assert hidden is not None
    assert hidden.logits(bench.decoder).cpu() == pytest.approx(bench.logits(bench.plain, ids_of(40)), abs=1e-4)


def test_nan_in_padding_does_no_harm(bench: Bench) -> None:
    bench.check(ids_of(40))
    bench.capture()
    buffers = bench.graphs._buffers
    assert buffers is not None
    for buffer in (buffers.delta, buffers.residual):
        buffer.fill_(torch.nan)
    bench.check(ids_of(40))
    assert bool(buffers.delta[40:64].isnan().all())


def test_padding_writes_to_the_spare_block_alone(bench: Bench) -> None:
    bench.logits(bench.pool, ids_of(40))
    bench.capture()
    for cache in bench.pool.tensors:
        cache.fill_(7.0)
    rows = bench.rows(bench.pool.new_sequence(40), 40)
    forward(bench.decoder, rows, upload(ids_of(40), CUDA))
    assert bench.num("graph replay") > 0
    own = set((rows.slots // BLOCK_SIZE).tolist())
    for cache in bench.pool.tensors:
        changed = (cache.view(NUM_BLOCKS, -1) != 7.0).any(-1).nonzero().flatten().tolist()
        assert set(changed) - own <= {0}  # the decode graphs' spare block, the first that was allocated


class Fresh(Steps):
    def fresh(self, fresh: FreshKV) -> None:
        assert len(fresh.k) == 40


class Attended(Steps):
    def attended(self, layer: DecoderLayer, output: Tensor) -> None:
        assert len(output) == 40


class Narrowed(Steps):
    """Half of the rows continue after the second layer."""

    def __init__(self, kept: Tensor) -> None:
        self._kept = kept

    def at(self, layer: DecoderLayer) -> LayerStep:
        return LayerStep(next_rows=self._kept if layer.index == 1 else None)


def test_only_plain_layers_are_graphs(bench: Bench) -> None:
    kept = upload([*range(0, 40, 2)], CUDA)
    for _ in range(2):
        bench.logits(bench.pool, ids_of(40), Attended())
        bench.logits(bench.pool, ids_of(40), Fresh())
        for cache in (*bench.pool.tensors, *bench.plain.tensors):
            cache.zero_()
        assert bench.logits(bench.pool, ids_of(40), Narrowed(kept)) == pytest.approx(
            bench.logits(bench.plain, ids_of(40), Narrowed(kept)), abs=1e-4
        )
        bench.capture()
    assert bench.num("graph replay") == NUM_LAYERS - 2  # layers 2 and 3 of the last pass
    assert not bench.gpu.errors


def test_no_memory_for_a_capture_is_told_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.check(ids_of(40))
    capture, captured = LayerGraphs._capture, []

    def full(graphs: LayerGraphs, function: object) -> object:
        captured.append(function)
        if len(captured) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return capture(graphs, function)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerGraphs, "_capture", full)
    for _ in range(3):
        bench.capture()
        bench.check(ids_of(40))
    assert len(captured) == 3
    assert not bench.graphs.is_on
    assert bench.num("graph replay") == 0
    assert [record.getMessage() for record in caplog.records] == [
        "layers of a prefill run without CUDA graphs from now on: CUDA out of memory"
    ]


def test_a_new_bucket_replaces_the_one_used_least_recently(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_graphs, "MOST_BUCKETS", 1)
    for _ in range(2):
        bench.check(ids_of(40))
        bench.check(ids_of(100))
        bench.capture()
        bench.check(ids_of(100))
    assert bench.num_rows == {128}


def test_row_buckets_are_whole_tiles() -> None:
    assert [row_bucket(n) for n in (1, 64, 65, 200, 256, 257, 640, 641)] == [64, 64, 128, 256, 256, 384, 640, 768]


LAST_LAYER = {"chunk_spread_kernel": 1, "common_kernel": 1, "move_stale_kernel": 1}  # narrows to the row of the logits


@pytest.mark.parametrize(("blend", "replays", "launched"), [
    ({"selector": "query"}, 4 + 4, LAST_LAYER),  # the probe's layers 1 to 4, and 1 to 4
    ({"selector": "query", "correction": "none"}, 4 + 4, {}),
    ({"selector": "hkvd"}, 3, LAST_LAYER),  # after the check layer
], ids=str)  # fmt: skip
def test_a_corrected_or_probed_layer_is_one_replay(
    blend: dict[str, str], replays: int, launched: dict[str, int], tmp_path: Path
) -> None:
    """Two prompts in turn, of 4 and of 3 chunks, which share graphs, have the answers of launches one by one."""
    setup = Setup.write(tmp_path, model={"num_hidden_layers": 6})
    with setup.store() as store, engine_gpu() as gpu:
        engine = setup.engine("cuda")
        keys = setup.precompute(engine, store)
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        asks = [AskRequest("what is it?", k, BlendParams(ratio=0.3, **blend), sampling) for k in (keys, keys[1:])]  # type: ignore[arg-type]
        engine.runtime.memory()
        expected = [engine.run_alone(store, ask) for ask in asks]
        capture_graphs(engine)
        gpu.clear()
        found = [engine.run_alone(store, ask) for ask in asks]
        assert not gpu.errors
        assert sum(gpu.found("graph replay", "layers").values()) == replays * len(asks)
        launches: Counter[str] = Counter()
        for (_, label), count in gpu.labels.items():
            launches[label.removeprefix("launch: ")] += count
        special = ("row_lse_kernel", "key_peaks_kernel", "chunk_spread_kernel", "common_kernel", "move_stale_kernel")
        assert {name: launches[name] for name in special if name in launches} == {
            name: count * len(asks) for name, count in launched.items()
        }
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.generated_ids, ours.chosen) == (theirs.generated_ids, theirs.chosen)
            assert [t.logprob for t in ours.logprobs] == pytest.approx([t.logprob for t in theirs.logprobs], abs=1e-4)


def test_a_capture_corrects_no_other_prompt(tmp_path: Path) -> None:
    """The graphs' tensors still hold the last prompt, whose blocks others may have."""
    setup = Setup.write(tmp_path, model={"num_hidden_layers": 6})
    with setup.store() as store, engine_gpu() as gpu:
        engine = setup.engine("cuda")
        keys, memory = setup.precompute(engine, store), engine.runtime.memory()
        assert memory is not None
        ask = AskRequest("what is it?", keys, BlendParams(ratio=0.3, selector="hkvd"), SamplingParams(max_tokens=1))
        worker = Worker(engine.model.decoder, memory)
        engine.run_alone(store, ask)
        assert worker.prepare()
        engine.run_alone(store, ask)
        before = [cache.clone() for cache in memory.pool.tensors]
        assert worker.prepare()
        for cache, held in zip(memory.pool.tensors, before, strict=True):
            changed = (cache.nan_to_num(7.0) != held.nan_to_num(7.0)).flatten(1).any(-1).nonzero()
            assert set(changed.flatten().tolist()) <= {0}  # the spare block
        assert not gpu.errors


@pytest.mark.parametrize("error", [RuntimeError("planted"), KeyError("planted")], ids=["of the device", "another"])
def test_an_idle_server_goes_on_if_a_capture_fails(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()

    def fail(graphs: LayerGraphs, function: object) -> None:
        failed.set()
        raise error

    def synchronize(device: object) -> None:
        raise RuntimeError("the device failed")

    setup = Setup.write(tmp_path, model={"num_hidden_layers": 6})
    with setup.store() as store, engine_gpu():
        engine = setup.engine("cuda")
        keys, memory = setup.precompute(engine, store), engine.runtime.memory()
        ask = AskRequest("what is it?", keys, BlendParams(ratio=0.3), SamplingParams(max_tokens=4, ignore_eos=True))
        stored = StoredEngine(engine, store, keys)
        service, found = AsyncEngine(engine.runtime), list[list[int]]()
        monkeypatch.setattr(LayerGraphs, "_capture", fail)
        with monkeypatch.context() as planted:
            planted.setattr(torch.cuda, "synchronize", synchronize)
            for _ in range(2):
                listener = Listener()
                service.submit(stored.request(ask), listener)
                found.append(listener.done().answers[0].generated_ids)
                assert failed.wait(60)
        assert service.close()
        assert found[0] == found[1]
        assert memory is not None
        assert isinstance(memory.pool.layer_graphs, LayerGraphs)
        assert not memory.pool.layer_graphs.is_on
        assert "without CUDA graphs" in caplog.text


def test_an_idle_server_captures_and_no_question_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture_next, idle = LayerGraphs.capture_next, threading.Event()

    def watched(graphs: LayerGraphs) -> bool:
        found = capture_next(graphs)
        if not found:
            idle.set()
        return found

    monkeypatch.setattr(LayerGraphs, "capture_next", watched)
    setup = Setup.write(tmp_path, model={"num_hidden_layers": 6})
    with setup.store() as store, engine_gpu() as gpu, setup.engine("cuda") as engine:
        keys, memory = setup.precompute(engine, store), engine.runtime.memory()
        assert memory is not None
        graphs = memory.pool.layer_graphs
        assert isinstance(graphs, LayerGraphs)
        ask = AskRequest("what is it?", keys, BlendParams(ratio=0.3), SamplingParams(max_tokens=4, ignore_eos=True))
        engine.use(store)
        answers, captured = [], []
        for _ in range(3):
            assert idle.wait(60)
            idle.clear()
            gpu.clear()
            answers.append(engine.ask(ask).generated_ids)
            captured.append(sum(len(each.replays) for each in graphs._buckets.values()))
        assert captured[1:] == [8, 8]
        assert graphs.num_in_passes == 0
        assert sum(gpu.found("graph replay", "layers").values()) == 8
        assert answers[0] == answers[1] == answers[2]
        assert not gpu.errors
