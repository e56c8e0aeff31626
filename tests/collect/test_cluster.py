"""precompute on other machines: KV in the tier, texts in the store, and a second run computes what is missing and
nothing else."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cacheblend_ray.cluster import RayCluster, Record, RemoteChunks, RemoteJob, RemoteWorker
from cacheblend_store import ChunkStore
from cacheblend_store.tier import open_tier
from checkpoints import write_checkpoint

from cacheblend_cli import extensions
from cacheblend_cli.cli import main
from cacheblend_cli.collect.events import PrecomputeReport
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.runtime import load_worker_model
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.loading import LoadedModel

MODEL = {"max_position_embeddings": 1024}


@dataclass
class InProcess(RayCluster):
    """A cluster of one worker in this process. groups: those that it computed."""

    groups: list[RemoteChunks] = field(default_factory=list)

    def collect(self, groups: Iterator[RemoteChunks]) -> Iterator[list[Record]]:
        worker = RemoteWorker(self.job)
        for group in groups:
            self.groups.append(group)
            yield worker.collect(group)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model"
    write_checkpoint(path, "qwen2", **MODEL)
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine.load(EngineConfig(model=str(model), threads=1))


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(4):
        paragraphs = [f"In paragraph {i} of page {number}, Mara leads team {7 * i + 31 * number}." for i in range(4)]
        (folder / f"{number}.txt").write_text("\n\n".join(paragraphs))
    return folder


@pytest.fixture
def cluster(engine: Engine, tmp_path: Path) -> InProcess:
    url = (tmp_path / "tier").as_uri()
    load = partial(load_worker_model, engine.runtime.worker_config(1))
    return InProcess("local", 1, RemoteJob(load, engine.model.fingerprint, url), open_tier(url))


def run(engine: Engine, docs: Path, cluster: RayCluster | None, store: Path, **given: Any) -> PrecomputeReport:
    options = replace(PrecomputeOptions(chunk_tokens=16, kv_dtype="exact", cluster=cluster), **given)
    with ChunkStore.open(store, mode="write") as opened:
        return engine.precompute(opened, [str(docs)], options, lambda event: None)


@pytest.mark.parametrize("context", ["sink", "document"])
def test_the_tier_gets_what_precompute_would_store(
    engine: Engine, docs: Path, cluster: InProcess, tmp_path: Path, context: str
) -> None:
    there = run(engine, docs, cluster, tmp_path / "store", context=context)
    here = run(engine, docs, None, tmp_path / "other", context=context)
    assert there.computed_tokens == here.computed_tokens > 0
    with ChunkStore.open(tmp_path / "store") as store, ChunkStore.open(tmp_path / "other") as other:
        keys = [manifest.key for manifest in other.chunks()]
        assert [m.key for m in store.chunks()] == keys
        assert not any(m.has_kv for m in store.chunks())
    found = {m.key: blobs for m, blobs in (cluster.tier.get_chunk(o.name, o.size) for o in cluster.tier.chunks())}
    assert sorted(found) == sorted(keys)


def test_a_second_run_computes_what_the_tier_lacks(
    engine: Engine, docs: Path, cluster: InProcess, tmp_path: Path
) -> None:
    first = run(engine, docs, cluster, tmp_path / "store")
    assert first.computed_tokens > 0
    again = run(engine, docs, cluster, tmp_path / "store")
    elsewhere = run(engine, docs, cluster, tmp_path / "another machine's store")
    assert (again.computed_tokens, elsewhere.computed_tokens) == (0, 0)
    lost = next(iter(cluster.tier.chunks()))
    cluster.tier.delete([lost.name])
    cluster.groups.clear()
    run(engine, docs, cluster, tmp_path / "store")
    [[(key, _)]] = [group.records for group in cluster.groups]
    assert cluster.tier.name(engine.runtime.collection("").in_codec("float32").id, key) == lost.name


def test_another_model_on_a_worker_is_refused(engine: Engine, docs: Path, cluster: InProcess, tmp_path: Path) -> None:
    cluster.job = replace(cluster.job, fingerprint="0" * 32)
    with pytest.raises(UsageError):
        run(engine, docs, cluster, tmp_path / "store")
    assert not list(cluster.tier.chunks())


def test_neighbours_are_refused(engine: Engine, docs: Path, cluster: InProcess, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        run(engine, docs, cluster, tmp_path / "store", context="neighbours")


@pytest.mark.parametrize(
    "flags",
    [
        ("--workers", "2"),
        ("--collector", "ray:local"),  # without --tier
        ("--collector", "ray:local", "--tier", "file:///tmp/t", "--workers", "0"),
        ("--collector", "ray:local", "--tier", "file:///tmp/t", "--watch"),
        ("--collector", "ray:local", "--tier", "file:///tmp/t", "--dry-run"),
        ("--collector", "ray:local", "--tier", "file:///tmp/t", "--max-size", "1GB"),
    ],
)
def test_flags_that_do_not_go_together(
    docs: Path, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extensions, "find", lambda kind, name: None)
    assert main.run(["precompute", str(docs), *flags]) == 2
    err = capsys.readouterr().err
    assert "--collector" in err or "--workers" in err


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_a_killed_worker_is_started_again(engine: Engine, docs: Path, cluster: InProcess, tmp_path: Path) -> None:
    once = tmp_path / "killed"

    def load_and_die_once() -> LoadedModel:
        if not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return cluster.job.load()

    with RayCluster("local", 2, replace(cluster.job, load=load_and_die_once), cluster.tier) as real:
        report = run(engine, docs, real, tmp_path / "store")
    assert report.computed_tokens > 0
    assert run(engine, docs, cluster, tmp_path / "store").computed_tokens == 0
