"""Commands over a store with one flipped bit: an answer is right, or a message names the chunk that was not used."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from bare_store import bare_writing
from cacheblend_store import ChunkStore
from children import Ended, outcomes
from ledger import Ledger
from page_map import page_map

from cacheblend_cli.cli.main import run
from cacheblend_cli.demo import handbook_dir

QUESTION = "What does Bruno Brandt drink?"
SOURCES = ("clara-janssen.md", "bruno-brandt.md", "dora-rossi.md")
OTHERS = ("casper-laurent.md", "celia-weber.md", "dagmar-vossler.md", "elsa-gaines.md", "erika-ellery.md")
OF_A_RUN = ("timing", "model", "notes")
DTYPE = "float32"  # else each number of threads measures which is faster, and may find another


def command(*arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(list(arguments))
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    """A store of some pages of the demo's handbook, and the ids of the chunks that are asked about."""
    folder = tmp_path_factory.mktemp("stored")
    path, pages = folder / "store", folder / "pages"
    pages.mkdir()
    for name in (*SOURCES, *OTHERS):
        shutil.copy(handbook_dir() / name, pages)
    code, out, err = command("precompute", str(pages), "--store", str(path), "--dtype", DTYPE, "--json")
    assert code == 0, err
    ids = {Path(r["source"]).name: r["id"] for r in map(json.loads, out.splitlines())}
    return path, tuple(ids[source] for source in SOURCES)


class Asking:
    """Asks one question of copies of the store. Made in the child that asks."""

    def __init__(self, source: Path, ids: tuple[str, ...], folder: Path) -> None:
        self._source, self._ids, self._folder = source, ids, folder
        self.expected = lru_cache(None)(self._expected)

    def ask(self, path: Path, *flags: str) -> tuple[int, dict[str, object], str]:
        """(exit code, all that is said of the answer but the times, stderr)."""
        code, out, err = command(
            "ask", QUESTION, "--chunks", ",".join(self._ids), "--store", str(path), "--max-tokens", "12", "--ratio", "0.1",
            "--dtype", DTYPE, "--logprobs", "2", "--ids", "--json", *flags,
        )  # fmt: skip
        said = json.loads(out) if code == 0 else {}
        return code, {name: value for name, value in said.items() if name not in OF_A_RUN}, err

    def _expected(self, missing: frozenset[str], prefix: bool) -> dict[str, object]:
        """The answer of a sound store without the KV of some chunks, or of the prefix."""
        path = self._folder / "expected"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self._source, path)
        with ChunkStore.open(path, mode="write") as store, bare_writing(store) as (txn, dbs):
            for manifest in store.chunks(prefixes=True):
                if manifest.id in missing or (prefix and manifest.context == "prefix"):
                    txn.delete(manifest.key + bytes(4), db=dbs["blobs"])
        code, said, err = self.ask(path, "--no-save")
        assert code == 0, err
        return said

    def check(self, path: Path, flags: tuple[str, ...], seen: Counter[str]) -> bool:
        """Return whether there was an answer. It must equal the answer of a sound store without the chunks reported as
        not used."""
        code, said, err = self.ask(path, *flags)
        assert "Traceback" not in err
        if code != 0:
            assert code in (3, 4), err
            assert (
                "damaged" in err or "not there" in err or "no chunk" in err or "truncated" in err or "meta page" in err
            ), err
            seen["refused"] += 1
            return False
        chunks = said["chunks"]
        missing = frozenset(c["id"] for c in chunks if c["status"] == "computed")  # type: ignore[union-attr, index]
        for id_ in missing:
            assert id_[:12] in err, "a chunk is computed and nothing said so"
        places_are_lost = "document records are damaged" in err
        for prefix in (False, True):
            expected = self.expected(missing, prefix)
            if said == expected or (places_are_lost and _without_places(said) == _without_places(expected)):
                seen["computed anew" if missing or prefix else "as it was"] += 1
                assert not prefix or "stored KV" in err
                return True
        raise AssertionError(f"another answer: {said['answer']!r}")


def _without_places(said: dict[str, object]) -> dict[str, object]:
    return {**said, "chunks": [{**c, "place": "", "headings": []} for c in said["chunks"]]}  # type: ignore[attr-defined]


def _flips(path: Path, ids: tuple[str, ...], count: int) -> list[tuple[int, int]]:
    """(byte, bit): of the blobs that are asked about, and of every kind of page that leads to them."""
    kinds, page_size = page_map(path / "data.mdb")
    with ChunkStore.open(path) as store, store.read() as reader:
        asked = {bytes.fromhex(i) for i in ids} | {m.key for m in store.chunks(prefixes=True) if m.context == "prefix"}
        nodes = [node for node in reader.pages.nodes("blobs") if node.key[:20] in asked and node.pgno]
    rng = random.Random(count)
    places = []
    for number in range(count):
        kind = ("value", "leaf", "value", "branch", "leaf", "meta")[number % 6]
        if kind == "value":
            node = rng.choice(nodes)
            at = node.pgno * page_size + rng.choice((rng.randrange(64), rng.randrange(16 + node.size)))
        else:
            at = rng.choice(kinds[kind]) * page_size + rng.randrange((page_size, 168)[number % 2])
        places.append((at, rng.randrange(8)))
    return places


@pytest.mark.parametrize("count", [6, pytest.param(500, marks=pytest.mark.torture)])
def test_a_flipped_bit_never_changes_an_answer(
    tmp_path: Path, stored: tuple[Path, tuple[str, ...]], count: int
) -> None:
    """Verify, ask (which stores the computed KV), and ask again."""
    source, ids = stored
    original = (source / "data.mdb").read_bytes()
    asking, baseline = Asking(source, ids, tmp_path), dict[str, object]()

    def work(item: tuple[int, int]) -> dict[str, int]:
        torch.set_num_threads(1)
        if not baseline:
            baseline.update(asking.expected(frozenset(), False))
        path, image, seen = tmp_path / "store", bytearray(original), Counter[str]()
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700)
        image[item[0]] ^= 1 << item[1]
        (path / "data.mdb").write_bytes(image)
        code, _, err = command("chunks", "verify", "--store", str(path))
        assert code in (0, 4), err
        seen["found by verify" if code else "harmless"] += 1
        answered = asking.check(path, (), seen)
        if code == 0:
            assert answered
            assert seen["as it was"], "verify found nothing, and something was computed anew"
        if answered:
            assert asking.check(path, ("--no-save",), seen)
        return seen

    bad, totals = [], Counter[str]()
    for item, outcome in outcomes(work, _flips(source, ids, count), timeout=120):
        if isinstance(outcome, Ended):
            bad.append((item, str(outcome)[:500]))
        else:
            totals.update(outcome)
    assert not bad, f"{len(bad)} of {count}:\n" + "\n".join(map(str, bad[:5]))
    assert min(totals["as it was"], totals["computed anew"]) > 0, totals
    Ledger().add("single-bit flips, then verify and ask", flips=count, other_answers=0, signals=0, **totals)
