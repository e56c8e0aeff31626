"""precompute in this process, and on one and two workers of a local Ray cluster that put the KV to a tier in a folder.

    PYTHONPATH=connectors/ray python benchmarks/ray_workers.py [--documents 2000] [--model DIR] [--threads 1]

Documents of 300 words; every process computes with --threads CPU threads. Prints documents a second, workers' start
left out, and the bytes of records that went to the workers and came back. The default model has SmolLM2-135M's width
and 6 layers, with random weights.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from functools import partial
from pathlib import Path

from cacheblend_ray.cluster import LOCAL, RayCluster, RemoteJob
from cacheblend_store import ChunkStore
from cacheblend_store.tier import open_tier
from machine import hardware, write_checkpoint
from scaling import SMOLLM2

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.runtime import load_worker_model

WORDS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = given.model
        if model is None:
            (folder / "shape.json").write_text(json.dumps(SMOLLM2 | {"num_hidden_layers": 6}))
            model = write_checkpoint(folder / "model", folder / "shape.json")
        write_documents(folder / "first", 12)
        write_documents(folder / "docs", given.documents)
        engine = Engine.load(EngineConfig(model=str(model), dtype="float32", threads=given.threads))
        print(hardware())
        print("| | documents/s | sent to workers | returned | KV put |\n|---|---|---|---|---|")
        for workers in (0, 1, 2):
            print(measured(engine, folder, given.documents, workers, given.threads), flush=True)


def write_documents(folder: Path, count: int) -> None:
    rng = random.Random(str(folder.name))
    words = [f"word{i}" for i in range(2000)]
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.txt").write_text(" ".join(rng.choice(words) for _ in range(WORDS)) + "\n")


def measured(engine: Engine, folder: Path, documents: int, workers: int, threads: int) -> str:
    """Return a row of the table. workers: 0 = plain precompute."""
    url = (folder / f"tier{workers}").as_uri()
    load = partial(load_worker_model, engine.runtime.worker_config(threads))
    job = RemoteJob(load, engine.model.fingerprint, url)
    with (
        RayCluster(LOCAL, max(1, workers), job, open_tier(url), threads) as cluster,
        ChunkStore.open(folder / f"store{workers}", mode="write") as store,
    ):
        options = PrecomputeOptions(chunk_tokens=512, kv_dtype="auto", cluster=cluster if workers else None)
        for part in ("first", "docs"):  # the first documents start the workers
            cluster.sent_bytes = cluster.returned_bytes = 0
            report = engine.precompute(store, [str(folder / part)], options, lambda event: None)
    assert report.computed_tokens == report.tokens
    name = f"{workers} workers" if workers else "plain"
    amounts = (f"{n / 2**20:.1f} MiB" for n in (cluster.sent_bytes, cluster.returned_bytes, report.bytes))
    return f"| {name} | {documents / report.seconds:.2f} | {' | '.join(amounts)} |"


if __name__ == "__main__":
    main()
