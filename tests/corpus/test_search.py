"""Search over stored chunks: what is found, in which order, and that the index follows the store."""

from __future__ import annotations

import os
import random
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from bare_store import bare_writing
from cacheblend_store import ChunkStore, StoreReader, verify
from cacheblend_store.format.records import document_key
from stored_texts import forget
from stored_texts import put_document as put

from cacheblend_cli.corpus import search as search_module
from cacheblend_cli.corpus import search_index
from cacheblend_cli.corpus.normalise import fts5_tokenizer
from cacheblend_cli.corpus.ranking import query_terms
from cacheblend_cli.corpus.search import Lookup, SearchResult, damaged_note, look, search
from cacheblend_cli.corpus.search_index import open_index
from cacheblend_cli.errors import NotFoundError
from cacheblend_cli.types import SearchParams


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store", mode="write") as opened:
        put(
            opened,
            "/docs/mara-lind.md",
            "# Mara Lind\n\nMara Lind started in 2011.\n\n",
            "She lives in Bergen, and the canteen closes at five.\n\n",
            "Her desk is in the Heron building.\n",
        )
        put(opened, "/docs/jonas-berg.md", "# Jonas Berg\n\nJonas leads billing.\n\n", "He lives in Oslo.\n")
        put(opened, "/docs/faq.md", "The canteen opens at nine.\n")
        yield opened


def found(store: ChunkStore, query: str, k: int = 10) -> list[str]:
    return [f"{Path(h.source).stem}#{h.index}" for h in search(store, query, Lookup(k)).hits]


def test_a_page_is_found_by_its_title_though_its_paragraphs_do_not_name_it(store: ChunkStore) -> None:
    assert sorted(found(store, "Where does Mara Lind live?")[:3]) == ["mara-lind#0", "mara-lind#1", "mara-lind#2"]
    assert found(store, "Where does Mara Lind live?", 1) == ["mara-lind#1"]


def test_words_are_stemmed_and_question_words_do_not_count(store: ChunkStore) -> None:
    assert found(store, "who is the lead of the billing") == ["jonas-berg#0"]
    assert found(store, "what are the buildings?") == ["mara-lind#2"]
    assert len(found(store, "where is the")) > 0  # there is nothing else to go by


def test_the_words_of_how_many_are_question_words() -> None:
    assert list(query_terms("How many days off do I get?")) == ['"days"']
    assert list(query_terms("How much?")) == ['"how"', '"much"'], "there is nothing else to go by"


@pytest.mark.parametrize(
    "query", ['"', "AND OR NOT (", "NEAR(billing", "body: billing*", "billing'; DROP TABLE chunks", "^", "\x00", "- -"]
)
def test_any_text_is_a_query(store: ChunkStore, query: str) -> None:
    hits = found(store, query)
    assert ("jonas-berg#0" in hits) == ("billing" in query)


def test_a_query_without_words_finds_nothing(store: ChunkStore) -> None:
    assert query_terms("?! ...") == {}
    assert search(store, "?! ...", Lookup(5)).hits == []


def test_k_bounds_the_hits_and_the_snippet_is_one_line(store: ChunkStore) -> None:
    [hit] = search(store, "Bergen", Lookup(1)).hits
    assert hit.snippet == "She lives in Bergen, and the canteen closes at five."
    assert hit.score > 0
    assert store.resolve(hit.id[:12]) == hit.key


def places(result: SearchResult) -> list[str]:
    return [f"{Path(hit.source).stem}#{hit.index}" for hit in result.hits]


def test_a_hit_whose_text_a_better_one_contains_is_left_out_and_another_takes_its_place(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "/docs/rules.md", "# Rules\n\nBooks are lent for six weeks.\n\n", "Ask the library.\n")
    put(store, "/docs/library.md", "# The library\n\nBooks are due. Ask  the\nlibrary. It lends cameras, too.\n")
    put(store, "/docs/office.md", "# Office\n\nThe library is on the third floor, the archive is below.\n")
    result = search(store, "ask the library about cameras", Lookup(2))
    assert places(result) == ["library#0", "office#0"]
    assert result.num_repeated == 1
    result = search(store, "ask the library about rules", Lookup(3))
    assert places(result)[:2] == ["rules#1", "library#0"]
    assert result.num_repeated == 0, "the text of a hit may be in a worse one"
    monkeypatch.setattr(search_module, "_COMPARED", 0)
    assert search(store, "ask the library about cameras", Lookup(9)).num_repeated == 0


def test_words_are_not_part_of_longer_words(store: ChunkStore) -> None:
    put(store, "/docs/a.md", "# A\n\nGarden parties are held in June, garden tools are in the shed.\n")
    put(store, "/docs/b.md", "en parties are held in June, garden tools\n")
    result = search(store, "garden parties in June, tools in the shed", Lookup(5))
    assert [Path(hit.source).stem for hit in result.hits] == ["a", "b"]
    assert result.num_repeated == 0


def test_the_index_follows_the_store(store: ChunkStore) -> None:
    assert found(store, "canteen") == ["faq#0", "mara-lind#1"]
    put(store, "/docs/faq.md", "# Harbor\n\nNothing is here.\n", "The canteen is gone.\n")
    assert found(store, "canteen opens nine") == ["mara-lind#1", "faq#1"] or set(
        found(store, "canteen opens nine")
    ) == {"mara-lind#1", "faq#1"}
    assert found(store, "harbor") == ["faq#0", "faq#1"]
    forget(store, "one", "/docs/faq.md")
    assert found(store, "canteen") == ["mara-lind#1"]
    store.remove_chunks([search(store, "canteen", Lookup(1)).hits[0].key])
    assert found(store, "canteen") == []
    assert found(store, "Mara Lind") == ["mara-lind#0", "mara-lind#2"]


def test_a_new_title_reaches_the_paragraphs_that_did_not_change(store: ChunkStore) -> None:
    assert found(store, "Solveig") == []
    rest = ("She lives in Bergen, and the canteen closes at five.\n\n", "Her desk is in the Heron building.\n")
    put(store, "/docs/mara-lind.md", "# Solveig Holm\n\nShe is new.\n\n", *rest)
    assert sorted(found(store, "Solveig")) == ["mara-lind#0", "mara-lind#1", "mara-lind#2"]


def test_a_moved_document_is_found_under_its_new_name(store: ChunkStore) -> None:
    put(store, "/docs/billing.md", "# Jonas Berg\n\nJonas leads billing.\n\n", "He lives in Oslo.\n")
    forget(store, "one", "/docs/jonas-berg.md")
    assert {h.source for h in search(store, "Oslo", Lookup(5)).hits} == {"/docs/billing.md"}


def test_what_is_stored_twice_is_found_once(store: ChunkStore) -> None:
    put(store, "/docs/copy.md", "The canteen opens at nine.\n")
    put(store, "/docs/faq.md", "The canteen opens at nine.\n", collection="two")
    assert len(search(store, "nine", Lookup(9)).hits) == 1
    [hit] = search(store, "nine", Lookup(9), collections=["two"]).hits
    manifest = store.get_chunk(hit.key)
    assert manifest is not None
    assert manifest.collection == "two"
    for word in ("ten", "noon", "dusk", "dawn", "midnight", "Monday"):  # whichever of the keys comes first
        for source, collection in (("copy", "one"), ("faq", "one"), ("faq", "two")):
            put(store, f"/docs/{source}-{word}.md", f"The canteen opens at {word}.\n", collection=collection)
        assert len(search(store, word, Lookup(9)).hits) == 1


def test_scripts_without_spaces(store: ChunkStore) -> None:
    put(store, "/docs/kyoto.md", "京都の図書館は九時に開きます。\n")
    [hit] = search(store, "図書館はいつ開く", Lookup(1)).hits
    assert hit.source == "/docs/kyoto.md"
    assert "図書館" in hit.snippet


def test_ligatures_and_full_width_letters_are_the_letters_they_stand_for(store: ChunkStore) -> None:
    put(
        store,
        "/docs/lease.md",
        "# The Oﬀice\n\nThe rent of the oﬃce is \uff15\uff10\uff10 EUR, of 12\u00a0m², under Daten\u00adschutz.\n",
    )
    for query in ("office", "\uff4f\uff46fice", "500", "m2", "Datenschutz", "oﬃce"):
        [hit] = search(store, query, Lookup(1)).hits
        assert hit.source == "/docs/lease.md"
        assert "office" in hit.snippet


def test_a_refresh_reads_only_the_chunks_that_changed(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    loose = [store.get_chunk(hit.key) for hit in search(store, "canteen", Lookup(9)).hits]
    store.put_documents((), [document_key("one", "/docs/jonas-berg.md")])
    store.put_records([replace(m, key=bytes([i]) * 20, source=f"(sent)/{i}") for i, m in enumerate(loose) if m])
    found(store, "canteen")
    read: list[bytes] = []
    manifest, documents = StoreReader.manifest, StoreReader.documents
    monkeypatch.setattr(StoreReader, "manifest", lambda self, key: read.append(key) or manifest(self, key))  # type: ignore[func-returns-value]
    monkeypatch.setattr(StoreReader, "documents", lambda self: pytest.fail("every document is read") or documents(self))
    ids = put(store, "/docs/new.md", "# Harbor\n", "The harbor freezes.\n")
    read.clear()
    assert found(store, "harbor") == ["new#0", "new#1"]
    assert sorted(key.hex() for key in read) == sorted(ids)
    read.clear()
    forget(store, "one", "/docs/new.md")
    assert found(store, "harbor") == []
    assert read == []


@pytest.mark.parametrize("seed", range(2))
def test_an_index_that_followed_every_change_is_the_one_made_anew(tmp_path: Path, seed: int) -> None:
    """Documents that share chunks and names, in two collections, come, change and go; chunks without a document too."""
    rng = random.Random(seed)
    words = ["# Harbor", "# Mara", "canteen opens", "canteen closes", "billing", "lives in Oslo", "rent", "deposit"]
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        for step in range(60):
            source, collection = f"/docs/{rng.choice('abcd')}.md", rng.choice(["one", "two"])
            match rng.randrange(6):
                case 0 | 1 | 2:
                    put(store, source, *rng.sample(words, rng.randint(1, 5)), collection=collection)
                case 3:
                    forget(store, collection, source)
                case 4:
                    known = [m.key for m in store.chunks()]
                    store.remove_chunks(rng.sample(known, min(len(known), 2)))
                case _:
                    put(store, "/gone.md", rng.choice(words), f"loose {step}", collection=collection)
                    kept = [m for m in store.chunks() if m.source == "/gone.md"]
                    forget(store, collection, "/gone.md")
                    store.put_records(replace(m, source=rng.choice(["/gone.md", "(sent)/t/1", source])) for m in kept)
            if rng.random() < 0.4:
                followed = contents(store)
                (store.path / "search.sqlite3").unlink()
                assert contents(store) == followed


def contents(store: ChunkStore) -> list[tuple[object, ...]]:
    """What the index holds, but for the numbers of its rows."""
    with open_index(store) as db:
        places = db.execute(
            "SELECT key, p.source, position, collection, context, document, chunks.source, title, body, pending.id IS NULL"
            " FROM places AS p LEFT JOIN chunks ON chunks.rowid = p.id LEFT JOIN pending USING (id)"
        ).fetchall()
        versions = db.execute("SELECT * FROM versions").fetchall()
        [strays] = db.execute("SELECT count(*) FROM chunks WHERE rowid NOT IN (SELECT id FROM places)").fetchone()
    assert strays == 0
    return sorted(places, key=repr) + sorted(versions, key=repr)


def test_the_file_is_private_and_a_damaged_one_is_made_anew(store: ChunkStore) -> None:
    found(store, "canteen")
    path = store.path / "search.sqlite3"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(b"no database" * 1000)
    assert found(store, "canteen") == ["faq#0", "mara-lind#1"]
    path.unlink()
    assert found(store, "canteen") == ["faq#0", "mara-lind#1"]


def test_an_index_of_another_store_or_version_is_made_anew(store: ChunkStore, tmp_path: Path) -> None:
    found(store, "canteen")
    with ChunkStore.open(tmp_path / "other", mode="write") as other:
        put(other, "/docs/x.md", "The canteen moved.\n")
        (other.path / "search.sqlite3").write_bytes((store.path / "search.sqlite3").read_bytes())
        assert found(other, "canteen") == ["x#0"]
    with sqlite3.connect(store.path / "search.sqlite3") as db:
        db.execute("PRAGMA user_version = 1")
    assert found(store, "canteen") == ["faq#0", "mara-lind#1"]


INDEX_DAMAGE = {
    "block of words": "UPDATE chunks_data SET block = x'ffffffffffffffffffffffff' WHERE id > 1",
    "no block": "DELETE FROM chunks_data WHERE id > 1",
    "structure of words": "UPDATE chunks_data SET block = x'ffffffffffff' WHERE id = 10",
    "no texts": "DELETE FROM chunks_content",
    "sizes": "UPDATE chunks_docsize SET sz = x'ff'",
    "key of each place": "UPDATE places SET key = 'ffffffffffffffffffffffffffffffffffffffff'",
    "other keys": "UPDATE places SET key = 'ff' || substr(key, 3)",
    "not a key": "UPDATE places SET key = 'xyz'",
    "context": "UPDATE places SET context = 'nosuch'",
    "date": "UPDATE versions SET updated = 'now' WHERE rowid = 1",
    "stamp of another kind": "UPDATE stamp SET value = 7",
    "no stamp": "DELETE FROM stamp",
    "trigger": "CREATE TRIGGER t AFTER DELETE ON stamp BEGIN DELETE FROM places; END",
    "view": "ALTER TABLE stamp RENAME TO s; CREATE VIEW stamp AS SELECT value FROM s",
    "more tables": "CREATE TABLE more (x)",
    "index": "CREATE INDEX more ON places (abs(position))",
    "no table": "DROP TABLE damaged",
}


@pytest.mark.parametrize("statements", INDEX_DAMAGE.values(), ids=INDEX_DAMAGE)
@pytest.mark.parametrize("changes", [False, True])
def test_an_index_that_is_damaged_or_from_elsewhere_is_made_anew(
    store: ChunkStore, tmp_path: Path, statements: str, changes: bool
) -> None:
    """changes: the damage is met while the index is updated."""
    before = found(store, "canteen")
    path = store.path / "search.sqlite3"
    with closing(sqlite3.connect(path)) as db:
        db.executescript(statements)
    if changes:
        put(store, "/docs/tea.md", "Tea is at four.\n")
        assert found(store, "tea") == ["tea#0"]
    assert found(store, "canteen") == before
    with closing(sqlite3.connect(path)) as db, closing(sqlite3.connect(":memory:")) as fresh:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        db.execute("INSERT INTO chunks (chunks) VALUES ('integrity-check')")
        for statement in search_index._TABLES.format(tokenizer=fts5_tokenizer(), schema=1).split(";"):
            fresh.execute(statement)
        names = "SELECT type, name FROM sqlite_master ORDER BY name"
        assert db.execute(names).fetchall() == fresh.execute(names).fetchall()


def test_an_error_that_a_new_index_has_too_is_not_hidden(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours must not make the index anew for each question."""
    calls = []

    def broken(*_: object) -> None:
        calls.append(os.stat(store.path / "search.sqlite3").st_ino)
        raise ValueError("a fault")

    monkeypatch.setattr(search_module, "Query", broken)
    for _ in range(2):
        with pytest.raises(ValueError, match="a fault"):
            found(store, "canteen")
    assert len(calls) == 4
    assert len(set(calls[1:])) == 1


def test_a_store_that_cannot_be_written_is_searched_in_memory(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.close()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with ChunkStore.open(store.path) as reading:
        assert found(reading, "canteen") == ["faq#0", "mara-lind#1"]
    assert not (store.path / "search.sqlite3").exists()


def test_several_processes_search_while_the_store_changes(store: ChunkStore) -> None:
    code = (
        "import sys; from cacheblend_store import ChunkStore; from cacheblend_cli.corpus.search import Lookup, search\n"
        "with ChunkStore.open(sys.argv[1]) as s:\n"
        "    for _ in range(20): assert len(search(s, 'canteen', Lookup(50)).hits) >= 2"
    )
    readers = [
        subprocess.Popen([sys.executable, "-c", code, str(store.path)], stderr=subprocess.PIPE) for _ in range(3)
    ]
    for i in range(15):
        put(store, f"/docs/{i}.md", f"The canteen again, number {i}.\n")
    for reader in readers:
        assert reader.communicate(timeout=60)[1] == b""
        assert reader.returncode == 0
    assert len(found(store, "canteen", 50)) == 17


def damage(store: ChunkStore, key: str) -> bytes:
    """Flip a bit of a chunk's record. Return the record as it was."""
    with bare_writing(store) as (transaction, dbs):
        record = bytes(transaction.get(bytes.fromhex(key), db=dbs["chunks"]))
        transaction.put(bytes.fromhex(key), record[:-1] + bytes([record[-1] ^ 1]), db=dbs["chunks"])
    return record


def test_chunks_that_cannot_be_searched_are_counted(store: ChunkStore) -> None:
    """Where the index is built after their records were damaged."""
    ids = put(store, "/docs/lunch.md", "Lunch is at noon.\n", "The soup is free.\n", "No dessert.\n")
    damage(store, ids[1])
    result = search(store, "soup lunch", Lookup(5))
    assert [f"{Path(h.source).stem}#{h.index}" for h in result.hits] == ["lunch#0", "lunch#2"]
    assert result.num_damaged == 1
    assert damaged_note(1).startswith("1 stored chunk is damaged and not searched; repair: ")
    assert search(store, "?!", Lookup(5)).num_damaged == 1
    said: list[str] = []
    with pytest.raises(NotFoundError):
        look(store, "soup", SearchParams(by="words"), said.append)
    assert said == [damaged_note(1)]

    put(store, "/docs/other.md", "Something else.\n")  # an update of other chunks
    assert search(store, "soup", Lookup(5)).num_damaged == 1
    verify(store, repair=True)
    assert search(store, "soup", Lookup(5)).num_damaged == 0
    put(store, "/docs/lunch.md", "Lunch is at noon.\n", "The soup is free.\n", "No dessert.\n")
    assert found(store, "soup") == ["lunch#1"]


def test_damaged_chunks_are_counted_anew_where_all_is_compared(store: ChunkStore, tmp_path: Path) -> None:
    """As after the change log had a gap."""
    [key] = put(store, "/docs/lunch.md", "Lunch is at noon.\n")
    damage(store, key)
    assert search(store, "lunch", Lookup(5)).num_damaged == 1
    forget(store, "one", "/docs/lunch.md")
    with sqlite3.connect(store.path / "search.sqlite3") as db:
        db.execute("UPDATE stamp SET value = ?", (f"{store.identity}:1",))
    assert search(store, "lunch", Lookup(5)).num_damaged == 0
