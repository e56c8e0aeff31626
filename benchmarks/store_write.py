"""Writing: commits of chunks, durable on return, against a plain file of the same bytes."""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cacheblend_store import ChunkStore
from store_load import Chunk, best_and_median, make_chunk, shape, timed

from cacheblend_cli.collect.commits import GROUP_BYTES

NUM_CHUNKS = 32


def measure_write(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure chunks of 512 tokens in fp32, encoded beforehand. Each round starts with an empty store or file and after
    a sync."""
    spec = shape()
    chunks = [make_chunk(spec, seed) for seed in range(NUM_CHUNKS)]
    size = sum(len(b) for _, blobs in chunks for b in blobs)
    groups = grouped(chunks, GROUP_BYTES)
    seconds, median = best_and_median(
        {
            "groups": lambda: write_store(folder, groups),
            "file": lambda: write_file(folder, [chunks]),
            "file_groups": lambda: write_file(folder, groups),
            "single": lambda: write_store(folder, [[c] for c in chunks]),
            "file_single": lambda: write_file(folder, [[c] for c in chunks]),
            "reused": lambda: write_store(folder, groups, again=True),
            "file_overwritten": lambda: write_file(folder, groups, again=True),
        },
        rounds,
    )
    return {
        "bytes": size,
        "chunks": NUM_CHUNKS,
        "group_bytes": GROUP_BYTES,
        "commits": len(groups),
        "rounds": rounds,
        "seconds": seconds,
        "median_seconds": median,
        "ratio": {
            "groups": seconds["file"] / seconds["groups"],
            "groups_to_fsync_each": seconds["file_groups"] / seconds["groups"],
            "single_to_fsync_each": seconds["file_single"] / seconds["single"],
            "reused": seconds["file_overwritten"] / seconds["reused"],
            "reused_to_new_file": seconds["file_groups"] / seconds["reused"],
        },
        "chunk_commit_s": median["single"] / NUM_CHUNKS,
        "bytes_of_a_chunk": int(statistics.median(sum(map(len, blobs)) for _, blobs in chunks)),
    }


def grouped(chunks: Sequence[Chunk], most: int) -> list[list[Chunk]]:
    """Group chunks as `collect.commits` does if they come faster than they are written."""
    groups: list[list[Chunk]] = [[]]
    size = 0
    for chunk in chunks:
        groups[-1].append(chunk)
        size += sum(map(len, chunk[1]))
        if size >= most:
            groups.append([])
            size = 0
    return [group for group in groups if group]


def write_store(folder: Path, groups: Sequence[Sequence[Chunk]], *, again: bool = False) -> float:
    """Return seconds of commits into an empty store. again: into the pages of the same chunks, after their removal."""
    path = folder / "written"
    shutil.rmtree(path, ignore_errors=True)
    with ChunkStore.open(path, mode="write") as store:
        if again:
            put(store, groups)
            store.remove_chunks(manifest.key for group in groups for manifest, _ in group)
            put(
                store, [groups[0][:1]]
            )  # LMDB takes freed pages from the second commit after the one that freed them on
            store.remove_chunks([groups[0][0][0].key])
        os.sync()
        seconds = timed(lambda: put(store, groups))
    shutil.rmtree(path)
    return seconds


def put(store: ChunkStore, groups: Sequence[Sequence[Chunk]]) -> None:
    for group in groups:
        store.put_chunks(group)


def write_file(folder: Path, groups: Sequence[Sequence[Chunk]], *, again: bool = False) -> float:
    """Return seconds of write() of the same blobs one after another, with fsync after each group. again: over the same
    file."""
    path = folder / "written.bin"
    handle = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)

    def work() -> None:
        for group in groups:
            for _, blobs in group:
                for blob in blobs:
                    os.write(handle, blob)
            os.fsync(handle)

    if again:
        work()
        os.lseek(handle, 0, os.SEEK_SET)
    os.sync()
    seconds = timed(work)
    os.close(handle)
    path.unlink()
    return seconds
