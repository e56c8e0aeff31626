"""Tensor parallelism on gloo processes: two and four ranks give what one gives, and end together."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hub_families
import hub_models
import pytest
import torch
from adapters import write_adapter
from cacheblend_store import ChunkStore
from checkpoints import write_checkpoint
from gguf_files import write_gguf
from hub_models import HubModel
from oracle_lookup import Oracle
from parity import PROMPT, QUESTION, write_documents
from transformers import DeepseekV3Config

from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.events import Limits
from cacheblend_cli.engine.outer_ranks import TORCHRUN, outer_ranks
from cacheblend_cli.engine.ranks import driver, rank_group
from cacheblend_cli.engine.ranks.driver import Begin, LoadModel, OtherRankFailed
from cacheblend_cli.engine.ranks.rank_group import RankGroup
from cacheblend_cli.errors import DeviceError, UsageError
from cacheblend_cli.model.families import read_spec, spec_from_config
from cacheblend_cli.model.rank_shard import RankShard, check_divisible
from cacheblend_cli.model.ranks import RankLost
from cacheblend_cli.model.weight_map import num_parameters
from cacheblend_cli.types import Answer, AskRequest, BlendParams, SamplingParams

TOLERANCE = 1e-4  # of log-probabilities, in float32
SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True)
IN_FULL = replace(SAMPLING, prompt_logprobs=5)
BLENDS = (
    BlendParams(mode="full"),
    BlendParams(ratio=0.15, selector="hkvd"),
    BlendParams(ratio=0.15, selector="query"),
    BlendParams(ratio=0.3, selector="query:2+hkvd", correction="none"),
)
MODELS = {model.name: model for model in [*hub_models.RUN, *hub_families.RUN]}
TWO = (
    "llama-3.2", "biases", "one KV head", "gemma-2", "gemma-4-e2b", "gemma-4-26b-a4b", "gemma-3n-e4b", "phi-3-mini-4k",
    "granite-3", "olmo-2, grouped", "glm-4-9b", "starcoder2", "stablelm, parallel", "command-r, biases", "qwen3-30b-a3b", "qwen1.5-moe",
    "gpt-oss-20b", "gpt-oss, mxfp4",
)  # fmt: skip
BY_ATTENTION = ("llama-3.2", "one KV head", "gemma-2", "gpt-oss-20b", "starcoder2")
"""Whose attention differs: the tokens that the question attends to are recomputed in CI."""
ALIKE = (
    "dynamic", "mistral-small-3", "gemma, biases, float16", "qwen2.5-vl", "gemma-3-4b", "ministral-3-8b", "gemma-3-1b", "gemma-4-31b",
    "smollm3", "glm-4-0414", "stablelm-2", "command-r7b", "mixtral-8x7b", "exaone-4-32b",
)  # fmt: skip
"""Divided in the same way as one of TWO."""
FOUR = ("olmo-2, grouped", *(pytest.param(name, marks=pytest.mark.torture) for name in ("llama-3.2", "one KV head")))
"""With fewer KV heads than ranks."""


class RankSetup:
    """A model, documents, and the answers of one rank."""

    def __init__(self, path: Path, documents: Path, model: HubModel | None = None) -> None:
        """model: to write; None: there is one, "model" in the path."""
        if model is not None:
            model.write(path / "model")
        self.path, self.documents = path, documents

    def engine(self, size: int, **config: Any) -> Engine:
        shared: dict[str, Any] = {"block_size": 16, "dtype": "float32", "kv_dtype": "exact"}
        given = {"model": str(self.path / "model")} | shared | config
        return Engine.load(EngineConfig(**given, prompt=PROMPT, threads=1, tensor_parallel=size))

    def store(self, engine: Engine) -> ChunkStore:
        """What the engine makes of the documents."""
        store = ChunkStore.open(self.path / f"store{engine.config.tensor_parallel}", mode="write")
        options = PrecomputeOptions(chunk_tokens=40, context="sink")
        engine.precompute(store, [str(self.documents)], options, lambda event: None)
        return store


def keys_of(store: ChunkStore) -> list[bytes]:
    return [m.key for m in sorted(store.chunks(), key=lambda m: (m.source, m.index))][:4]


def answers(engine: Engine, store: ChunkStore, blends: Sequence[BlendParams] = BLENDS[:3]) -> list[Answer]:
    return [
        engine.run_alone(
            store, AskRequest(QUESTION, keys_of(store), blend, IN_FULL if blend.mode == "full" else SAMPLING)
        )
        for blend in blends
    ]


def assert_same(one: list[Answer], many: list[Answer]) -> None:
    for ours, theirs in zip(one, many, strict=True):
        assert theirs.generated_ids == ours.generated_ids
        assert theirs.chosen == ours.chosen
        assert len(theirs.prompt_logprobs) == len(ours.prompt_logprobs)
        for a, b in zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=TOLERANCE)
    assert one[0].prompt_logprobs
    assert one[1].chosen


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("documents"), 3)


@pytest.fixture(scope="module", autouse=True)
def ranks_end(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("current")
        (folder / "torch.py").write_text("raise SystemExit(3)")  # no rank may run it
        patch.chdir(folder)
        yield
    while rank_group._group:
        rank_group._group.pop().close()


def group() -> RankGroup:
    return rank_group._group[0]


@pytest.mark.parametrize("name", [*TWO, *(pytest.param(name, marks=pytest.mark.torture) for name in ALIKE)])
def test_two_ranks_give_what_one_gives(name: str, tmp_path: Path, documents: Path) -> None:
    compare(2, name, tmp_path, documents, BLENDS[:3] if name in BY_ATTENTION else BLENDS[:2])


def compare(size: int, name: str, path: Path, documents: Path, blends: Sequence[BlendParams]) -> None:
    setup = RankSetup(path, documents, MODELS[name])
    one, many = setup.engine(1), setup.engine(size)
    assert many.model.fingerprint == one.model.fingerprint
    with setup.store(one) as own, setup.store(many) as other:
        assert keys_of(own) == keys_of(other)
        assert_same(answers(one, own, blends), answers(many, other, blends))


@pytest.fixture
def setup(tmp_path: Path, documents: Path) -> RankSetup:
    return RankSetup(tmp_path, documents, MODELS["llama-3.2"])


def test_a_batch_with_copied_and_swapped_blocks_is_answered_as_by_one_rank(setup: RankSetup) -> None:
    found = []
    for size in (1, 2):
        engine = Engine(setup.engine(size).runtime, limits=Limits(max_sequences=6, pool_tokens=14 * 16))
        with setup.store(engine) as store, engine:
            sampling = replace(SAMPLING, max_tokens=40, n=2, temperature=0.7, seed=3)
            asks = [
                AskRequest(f"{word} {QUESTION}", keys_of(store)[:2], sampling=sampling) for word in ("and", "so", "now")
            ]
            engine.use(store)
            found.append([answer.generated_ids for answer in engine.ask_many(asks)])
            stats = engine._started().stats()
            assert stats.preempted, "or nothing was swapped"
    assert found[0] == found[1]


def test_two_ranks_compute_the_rows_of_proposals(setup: RankSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, sampled = Oracle(monkeypatch), {"temperature": 1.0, "seed": 3}
    plain, fast = setup.engine(2, speculate="off"), setup.engine(2, speculate=3)
    with setup.store(plain) as store:
        asks = [
            AskRequest(QUESTION, keys_of(store), BLENDS[1], replace(SAMPLING, max_tokens=24, logprobs=1, **more))
            for more in ({}, sampled)
        ]
        expected = [plain.run_alone(store, ask) for ask in asks]
        for answer in expected:
            oracle.learn_answer(answer.prompt_ids, answer.generated_ids)
        found = [fast.run_alone(store, ask) for ask in asks]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.generated_ids == theirs.generated_ids
        assert ours.logprobs == theirs.logprobs
        assert [c.attention for c in ours.chunks] == [c.attention for c in theirs.chunks]
        assert 0 < ours.accepted_tokens < 20


def test_a_chunk_that_one_rank_cannot_read_is_computed_by_all(
    setup: RankSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = setup.engine(2)
    with setup.store(engine) as store:
        [expected] = answers(engine, store)[1:2]
        # reading lock.mdb would end this process's lock on it when it is closed, and a rank would reset it
        copy = shutil.copytree(store.path, setup.path / "copy", ignore=shutil.ignore_patterns("lock.mdb"))
        manifest = store.get_chunk(keys_of(store)[2])
        assert manifest is not None
        with store.read() as reader:
            stored = bytes(reader.layer(manifest, 1)["v"])[:64]
        data = (copy / "data.mdb").read_bytes()
        (copy / "data.mdb").write_bytes(data.replace(stored, bytes([stored[0] ^ 1]) + stored[1:]))
        monkeypatch.setattr(driver, "Begin", lambda worker, given, folder: Begin(worker, given, str(copy)))
        ask = AskRequest(QUESTION, keys_of(store), BlendParams(ratio=0.15, selector="hkvd"), SAMPLING)
        answer = engine.run_alone(store, ask)
        assert [chunk.status for chunk in answer.chunks].count("computed") == 1
        assert answer.chunks[2].status == "computed"
        assert any("rank 1" in note for note in answer.notes)
        monkeypatch.undo()
        assert answers(engine, store)[1].generated_ids == expected.generated_ids


def test_a_gguf_file_an_adapter_and_a_float8_pool_are_divided_too(tmp_path: Path, documents: Path) -> None:
    setup = RankSetup(tmp_path, documents)
    write_checkpoint(tmp_path / "model", "llama-gqa")
    write_adapter(tmp_path / "lora", tmp_path / "model", ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"])
    for kind in ("F16", "Q8_0"):
        write_gguf(tmp_path / "model", tmp_path / f"{kind}.gguf", "llama", kind)
    for config, most in (
        ({"model": str(tmp_path / "F16.gguf")}, 1e-4),
        ({"model": str(tmp_path / "Q8_0.gguf")}, 2e-3),  # rows are rounded in spans from a rank's first column on
        ({"lora": str(tmp_path / "lora")}, 1e-4),
        ({"kv_pool_dtype": "float8_e4m3"}, 0.1),  # a code of float8 may be the next one
    ):
        one, many = (setup.engine(size, **config) for size in (1, 2))
        with setup.store(one) as store:
            ask = AskRequest(QUESTION, keys_of(store), BLENDS[0], IN_FULL)
            ours, theirs = (engine.run_alone(store, ask) for engine in (one, many))
            assert theirs.generated_ids == ours.generated_ids
            pairs = zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True)
            assert max(abs(a.logprob - b.logprob) for a, b in pairs) <= most


def test_a_rank_has_half_of_the_weights(setup: RankSetup) -> None:
    spec = read_spec(setup.path / "model")
    wide = replace(
        spec, hidden_size=256, num_heads=8, num_kv_heads=4, head_dim=32, intermediate_size=512, vocab_size=4096
    )
    share = num_parameters(RankShard(wide, group().ranks).own) / num_parameters(wide)
    assert 0.5 <= share < 0.51


def test_what_cannot_be_divided_is_refused(setup: RankSetup, tmp_path: Path) -> None:
    spec = read_spec(setup.path / "model")
    for size in (3, 5, 8):  # of four heads
        with pytest.raises(UsageError) as refused:
            check_divisible(spec, size)
        assert refused.value.hint
    with pytest.raises(UsageError):
        check_divisible(replace(spec, num_heads=6, num_kv_heads=3), 2)
    with pytest.raises(UsageError):
        check_divisible(replace(spec, generic=True), 2)
    with pytest.raises(UsageError):
        check_divisible(spec_from_config(DeepseekV3Config().to_diff_dict()), 2)  # its latent is of all heads
    with pytest.raises(UsageError):
        setup.engine(2, weight_dtype="int8")


@pytest.mark.parametrize(
    ("tensor_parallel", "extra", "found"),
    [
        (0, {}, None),  # a training job of another program
        (0, {TORCHRUN: "none"}, (1, 2)),
        (1, {TORCHRUN: "none"}, None),
        (2, {}, (1, 2)),
        (4, {}, None),
        (4, {TORCHRUN: "none"}, (1, 2)),  # which is refused
    ],
)
def test_the_ranks_of_torchrun_are_used_and_no_other_programs(
    tensor_parallel: int, extra: dict[str, str], found: tuple[int, int] | None
) -> None:
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert outer_ranks(tensor_parallel, job | extra) == found
    assert outer_ranks(tensor_parallel, {**job, **extra, "WORLD_SIZE": "1"}) is None


def listening(pid: int) -> list[str]:
    """Addresses that a process listens at, in hex."""
    names = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.exists() or file.is_symlink()]
    rows = [
        line.split()
        for file in ("tcp", "tcp6")
        if (table := Path(f"/proc/{pid}/net/{file}")).exists()
        for line in table.read_text().splitlines()[1:]
    ]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in names]


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux")
def test_other_machines_cannot_connect_to_ranks(setup: RankSetup) -> None:
    setup.engine(2)
    found = listening(group()._children[1].pid)
    assert found
    assert set(found) == {"0100007F"}  # 127.0.0.1


def test_ranks_end_when_rank_0_is_interrupted_before_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(self: RankGroup, rank: int, port: int) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))
        return started[-1]

    def interrupted(self: RankGroup) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RankGroup, "_start", start)
    monkeypatch.setattr(RankGroup, "_join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RankGroup(3, torch.device("cpu"))
    assert [child.poll() for child in started] == [-signal.SIGKILL] * 2


def test_a_model_that_one_rank_cannot_load_is_an_error_and_the_next_one_is_loaded(
    setup: RankSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(driver, "LoadModel", lambda model, path, config: LoadModel(model, f"{path}-gone", config))
        with pytest.raises(OtherRankFailed):
            setup.engine(2)
    assert not group().is_lost
    with setup.engine(2) as engine:
        engine.use(None)
        engine.ask(QUESTION, documents=["Ada leads team one."], max_tokens=1)
    assert not driver.Driver.gone_workers  # the other rank has dropped its own


def test_loading_can_be_interrupted(setup: RankSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    setup.engine(2)
    lost = group()
    monkeypatch.setattr(driver, "load_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        setup.engine(2)
    assert lost.is_lost
    assert lost._children[1].poll() == -signal.SIGKILL


def test_a_lost_rank_leaves_no_temporary_store(setup: RankSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, codes = setup.engine(1), list[int]()
    engine.use(None)
    assert engine._folder is not None
    folder = Path(engine._folder.name)
    assert folder.exists()
    monkeypatch.setattr(os, "_exit", codes.append)
    options._exit_on_lost_rank(Output(quiet=True), engine, RankLost("rank 1 was lost"))
    assert codes == [5]
    assert not folder.exists()
    engine.close()


def test_a_killed_rank_is_named_and_ends_all(setup: RankSetup) -> None:
    engine = setup.engine(2)
    with setup.store(engine) as store:
        child = group()._children[1]
        os.kill(child.pid, signal.SIGTERM)  # which is rank 0's to answer
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(RankLost) as lost:
            answers(engine, store)
        assert "rank 1" in lost.value.message
        assert lost.value.exit_code == DeviceError.exit_code == 5
        assert child.wait() == -signal.SIGKILL


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_give_what_one_gives(name: str, tmp_path: Path, documents: Path) -> None:
    """Last, since other tests share two ranks."""
    compare(4, name, tmp_path, documents, BLENDS)
