"""Records and blobs that anybody may have written: taken as what they are or refused, at once and in little memory."""

from __future__ import annotations

import json
import random
import string
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bare_store import bare_writing
from cacheblend_store import BadBlob, ChunkStore, DocumentChunk, DocumentRecord, stats, verify
from cacheblend_store.format.blobs import CODECS, blob_spec, encode_blob
from cacheblend_store.format.records import (
    MAX_MANIFEST_BYTES,
    decode_document,
    decode_manifest,
    document_key,
    encode_document,
    encode_manifest,
    seal,
    unseal,
)
from cacheblend_store.state import read_state, write_state
from cacheblend_store.writer import with_digests
from children import Ended, limit_memory, outcomes
from ledger import Ledger
from mutations import mutate
from one_blob import read_blob, read_layer
from small_chunks import COLLECTION, key_of, make_chunk

SECONDS = 1.0  # of CPU, a bound of the formats: the slowest takes milliseconds
CASES = 50  # a child
Fuzz = Callable[[random.Random], str]

MANIFEST = with_digests(*make_chunk(1))
RECORD = unseal(MANIFEST.key, encode_manifest(MANIFEST))
DOCUMENT = DocumentRecord(
    "a.md", COLLECTION, "d", tuple(DocumentChunk(key_of(n), n, n, n + 1) for n in range(3)), 1.0, {}
)
DOCUMENT_KEY = document_key(COLLECTION, "a.md")
SHAPE = (33, 2, 8)
SPECS = {codec: blob_spec(codec, *SHAPE) for codec in CODECS}
BLOBS = {c: encode_blob(s, {name: b"\1" * t.num_bytes for name, t in s.items()}) for c, s in SPECS.items()}


def _strange(rng: random.Random) -> Any:
    """A JSON value that a field does not expect."""
    return rng.choice(
        (None, True, -1, 0, 1 << 40, 1 << 80, 1.5, 2.0, float("nan"), float("inf"), "", "x" * 50, "\ud800", [], {}, [[]],
         [1, "2"], {"a": 1}, [None] * 3, "AAA", "AAAA", "zz" * 20, [-1, 5], [0, 1, 2])
    )  # fmt: skip


def _edited(rng: random.Random, payload: bytes) -> bytes:
    """The record with bytes changed, or with fields of other values, more of them or fewer."""
    if rng.random() < 0.3:
        return mutate(rng, payload)
    fields = json.loads(payload)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([*fields, "extra"]) if fields else "extra"
        what = rng.randrange(4)
        if what == 0:
            fields.pop(name, None)
        elif what == 1 and isinstance(fields.get(name), list) and fields[name]:
            fields[name][rng.randrange(len(fields[name]))] = _strange(rng)
        else:
            fields[name] = _strange(rng)
    return json.dumps(fields).encode("utf-8", "surrogatepass")


def fuzz_blob(rng: random.Random) -> str:
    """A blob whose header or data is edited, read as one of its codec or of another."""
    codec = rng.choice(CODECS)
    read_as = rng.choice(CODECS) if rng.random() < 0.1 else codec
    blob = BLOBS[codec]
    if rng.random() < 0.5:
        blob = mutate(rng, blob)
    else:
        header = _edited(rng, blob[8 : 8 + int.from_bytes(blob[:8], "little")].rstrip())
        blob = len(header).to_bytes(8, "little") + header + blob[8 + int.from_bytes(blob[:8], "little") :]
    parts = read_blob(blob, read_as, *SHAPE)
    assert {n: len(v) for n, v in parts.items()} == {n: t.num_bytes for n, t in SPECS[read_as].items()}
    return "taken"


def fuzz_manifest(rng: random.Random) -> str:
    """Half of them sealed again: whoever can write the store can make its digests right."""
    if rng.random() < 0.5:
        manifest = decode_manifest(MANIFEST.key, mutate(rng, encode_manifest(MANIFEST)))
        assert manifest == MANIFEST
        return "unchanged"
    manifest = decode_manifest(MANIFEST.key, seal(MANIFEST.key, _edited(rng, RECORD)))
    _use(manifest)
    return "taken"


def _use(manifest: Any) -> None:
    """What every reader does with a manifest it believes."""
    assert manifest.num_bytes >= 0
    assert f"{manifest.id} {manifest.text[:4]} {manifest.created:.1f} {manifest.source} {manifest.index:,}"
    assert all(0 <= i < 1 << 32 for i in manifest.token_ids + manifest.left_context_ids)
    assert all(len(digest) == 16 for digest in manifest.blob_digests)
    assert decode_manifest(manifest.key, encode_manifest(manifest)) == manifest
    try:
        for layer in range(manifest.num_layers):
            read_layer(make_chunk(1)[1][layer % 2], manifest, layer)
    except BadBlob:
        pass


def fuzz_document(rng: random.Random) -> str:
    payload = _edited(rng, unseal(DOCUMENT_KEY, encode_document(DOCUMENT)))
    document = decode_document(DOCUMENT_KEY, seal(DOCUMENT_KEY, payload))
    assert all(len(chunk.key) == 20 and chunk.start <= 1 << 53 for chunk in document.chunks)
    assert f"{document.source} {document.updated:.1f} {document.settings.get('x')} {document.content_digest[:4]}"
    return "taken"


FUZZ: dict[str, Fuzz] = {"blob": fuzz_blob, "manifest": fuzz_manifest, "document": fuzz_document}


def _many(item: tuple[str, int]) -> dict[str, float]:
    what, first = item
    limit_memory()
    seen, slowest = Counter[str](), 0.0
    for number in range(first, first + CASES):
        start = time.process_time()
        try:
            seen[FUZZ[what](random.Random(f"{what} {number}"))] += 1
        except BadBlob:
            seen["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"{what} {number}: {type(error).__name__}: {error}") from error
        slowest = max(slowest, time.process_time() - start)
    return {**seen, "slowest": slowest}


@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.torture)])
@pytest.mark.parametrize("what", list(FUZZ))
def test_fuzzed_records(what: str, count: int, ledger: Ledger) -> None:
    seen, slowest = Counter[str](), 0.0
    for item, outcome in outcomes(_many, [(what, first) for first in range(0, count, CASES)], timeout=60):
        assert not isinstance(outcome, Ended), (item, outcome)
        slowest = max(slowest, outcome.pop("slowest"))
        seen.update(outcome)
    assert sum(seen.values()) == count
    assert seen["refused"] > count / 3
    assert seen["taken"] > 0  # the edits reach behind the first check
    assert slowest < SECONDS
    ledger.add(f"fuzzed {what}s", cases=count, crashes=0, hangs=0, slowest_s=round(slowest, 4), **seen)


BOMBS = {
    "lists": b"[" + b"[]," * (MAX_MANIFEST_BYTES // 4) + b"[]]",
    "objects": b"[" + b"{}," * (MAX_MANIFEST_BYTES // 4) + b"{}]",
    "strings": b"[" + b'"",' * (MAX_MANIFEST_BYTES // 4) + b'""]',
    "numbers": b"[" + b"300," * (MAX_MANIFEST_BYTES // 5) + b"300]",
    "deep": b"[" * 1_000_000,
    "digits": b"9" * 4_000_000,
    "long": b'"' + b"x" * (64 << 20) + b'"',
}


@pytest.mark.parametrize("bomb", list(BOMBS))
def test_what_is_small_and_becomes_big_is_refused(bomb: str) -> None:
    fields = json.loads(RECORD)
    del fields["text"]

    def work(_: int) -> float:
        raw = json.dumps(fields).encode()[:-1] + b', "text": ' + BOMBS[bomb] + b"}"
        value = seal(MANIFEST.key, raw)
        limit_memory()
        start = time.process_time()
        with pytest.raises(BadBlob):
            decode_manifest(MANIFEST.key, value)
        return time.process_time() - start

    [(_, seconds)] = outcomes(work, [0], timeout=60)
    assert not isinstance(seconds, Ended), seconds
    assert seconds < SECONDS


def test_fields_of_any_manifest_travel() -> None:
    """What the checks let through is all that is written: odd texts, the longest numbers, every codec."""
    rng = random.Random(0)
    for codec in CODECS:
        text = "".join(rng.choices(string.printable + "ü€\ud800😀", k=200))
        manifest = replace(
            MANIFEST, text=text, source=text, codec=codec, index=1 << 40, span=(0, 1 << 40), created=1e9 + 0.5
        )
        assert decode_manifest(manifest.key, encode_manifest(manifest)) == manifest


def test_counters_that_are_none_are_counted_again(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        store.put_chunks([make_chunk(seed) for seed in range(4)])
        wanted = stats(store).live_bytes
        for value in (
            b"[]",
            b"{}x",
            b'{"live_bytes": "3"}',
            b'{"x": 1}',
            b'{"generation": null}',
            b"[" * 4000,
            b"\xff",
        ):
            with bare_writing(store) as (txn, dbs):
                txn.put(b"state", seal(b"state", value), db=dbs["meta"])
            with store.read() as reader:
                assert read_state(reader.get, reader.pages).live_bytes == wanted
            assert store.put_chunk(*make_chunk(1)) == "unchanged"


@pytest.mark.parametrize("value", [None, b"{}x", seal(b"state", b"[]")])
def test_a_quota_that_does_not_read_is_told(tmp_path: Path, value: bytes | None) -> None:
    with ChunkStore.open(tmp_path / "store", mode="write", max_bytes=1 << 30) as store:
        store.put_chunk(*make_chunk(1))
        with bare_writing(store) as (txn, dbs):
            if value is None:
                txn.delete(b"state", db=dbs["meta"])
            else:
                txn.put(b"state", value, db=dbs["meta"])
        [finding] = verify(store).findings
        assert finding.kind == "counter"
        assert "quota" in finding.message
        assert verify(store, repair=True).repaired == 1
        assert verify(store).ok


def test_a_counter_that_is_wrong_is_named(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        store.put_chunk(*make_chunk(1))
        with store.read() as reader:
            right = reader.state()
        wrong = replace(right, live_bytes=right.live_bytes + 7)
        with bare_writing(store) as (txn, dbs):
            write_state(txn, dbs, wrong)
        [finding] = verify(store).findings
        assert f"{wrong.live_bytes:,} bytes of blobs" in finding.message
        assert f"the actual number is {right.live_bytes:,}" in finding.message
