"""A store of many chunks: milliseconds of the look-ups of `ask` and `chunks ls`."""

from __future__ import annotations

import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from cacheblend_store import ChunkManifest, ChunkStore, KeyParts, chunk_key, collection_id, stats
from cacheblend_store.format.blobs import blob_spec, encode_blob
from store_load import timed

LAYERS, HEADS, DIM, NUM_TOKENS, PAGE, ASKED = 4, 1, 8, 64, 50, 8
PARTS = KeyParts("model", "tokenizer", (1,), (), "bfloat16")


def measure_many(folder: Path, count: int) -> dict[str, Any]:
    """Measure a store of small chunks, since look-ups do not read KV: each a manifest of 64 tokens with its text and
    four blobs."""
    path, rng = folder / "many", random.Random(0)
    start = time.perf_counter()
    with ChunkStore.open(path, mode="write") as store:
        for first in range(0, count, 2000):
            store.put_chunks([make(number) for number in range(first, min(first + 2000, count))])
    filled_s = time.perf_counter() - start
    keys = [make(number)[0].key for number in rng.sample(range(count), 400)]

    def opened() -> None:
        ChunkStore.open(path).close()

    with ChunkStore.open(path) as store:

        def look_up() -> None:
            """Read what `ask` reads of chunks given by id: resolve each, then its manifest."""
            for key in rng.sample(keys, ASKED):
                assert store.get_chunk(store.resolve(key.hex()[:12])) is not None

        def page() -> None:
            assert len(list(islice(store.chunks(start_after=rng.choice(keys)), PAGE))) in range(1, PAGE + 1)

        milliseconds = {
            f"look-up of {ASKED} chunks by id prefix (ask)": median_ms(look_up),
            f"one page of {PAGE} chunks, anywhere (chunks ls)": median_ms(page),
            "an id by its first 12 digits": median_ms(lambda: store.resolve(rng.choice(keys).hex()[:12])),
            "an ambiguous prefix of 2 digits": median_ms(lambda: _ambiguous(store, rng.choice(keys).hex()[:2])),
            "totals (chunks stats)": median_ms(lambda: stats(store)),
        }
    milliseconds["opening the store"] = median_ms(opened)
    command = [sys.executable, "-c", "from cacheblend_cli.cli.main import main; main()", "chunks", "ls"]
    whole = [*command, "--store", str(path), "--limit", str(PAGE), "--json"]
    milliseconds["the command chunks ls of a page, with the interpreter"] = median_ms(
        lambda: subprocess.run(whole, check=True, stdout=subprocess.DEVNULL), 7
    )
    size = (path / "data.mdb").stat().st_size
    shutil.rmtree(path)
    return {"chunks": count, "file_bytes": size, "fill_seconds": filled_s, "milliseconds": milliseconds}


def median_ms(work: Callable[[], Any], rounds: int = 51) -> float:
    work()
    return statistics.median(timed(work) for _ in range(rounds)) * 1000


def _ambiguous(store: ChunkStore, prefix: str) -> None:
    from cacheblend_store import AmbiguousId

    try:
        store.resolve(prefix)
    except AmbiguousId:
        return
    raise AssertionError(prefix)


def make(number: int) -> tuple[ChunkManifest, list[bytes]]:
    spec = blob_spec(PARTS.codec, NUM_TOKENS, HEADS, DIM)
    blob = encode_blob(spec, {name: number.to_bytes(8, "big") * (t.num_bytes // 8) for name, t in spec.items()})
    ids = tuple(range(number, number + NUM_TOKENS))
    text = f"chunk {number} " * 20
    manifest = ChunkManifest(
        key=chunk_key(PARTS, ids), token_ids=ids, text=text, model="model", model_name="m", tokenizer="tokenizer",
        collection=collection_id(PARTS), context="sink", left_context_ids=(), collected_len=NUM_TOKENS + 1,
        codec=PARTS.codec, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, source=f"docs/{number // 20}.md",
        index=number % 20, span=(0, len(text)), created=1.0,
    )  # fmt: skip
    return manifest, [blob] * LAYERS
