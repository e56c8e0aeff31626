"""Long documents are cut in another process: the same chunks, with limits, and ended when nobody waits for them."""

from __future__ import annotations

import sys
from subprocess import run

import pytest
import tokenizers
from cacheblend_documents.converted import Converted, Kind, Mark, NotConverted
from cacheblend_documents.limited_process import MIB
from checkpoints import write_tokenizer
from killing import killed_at_work

from cacheblend_cli.cancellation import Cancellation, Cancelled
from cacheblend_cli.corpus import cut_process
from cacheblend_cli.corpus.cut_process import CutLimits, DocumentCutter
from cacheblend_cli.corpus.cutting import CutSettings, cut_document
from cacheblend_cli.corpus.documents import Document
from cacheblend_cli.errors import TextRefused
from cacheblend_cli.model.text_encoder import TextEncoder
from cacheblend_cli.model.tokenizer import Tokenizer

TEXT = (
    "# The lead\n\nof billing is Mära <|im_end|> \U0001f600.\n\ndef f():\n    return 1\n\n\nTitle\n=====\n\nx y. z\n"
    * 12
)
CUT = CutSettings(40)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return Tokenizer(path).text_encoder


@pytest.fixture(scope="module")
def shared(encoder: TextEncoder) -> DocumentCutter:
    return DocumentCutter(encoder)


@pytest.fixture
def cutter(shared: DocumentCutter, monkeypatch: pytest.MonkeyPatch) -> DocumentCutter:
    """A cutter that cuts all documents in another process, in small batches."""
    monkeypatch.setattr(cut_process, "SHORT", -1)
    return shared


def document(text: str = TEXT, kind: Kind = "text", *marks: Mark, apart: bool = False) -> Document:
    return Document("folder/a.md", Converted(text, kind, not marks, marks, apart, "Title"))


@pytest.mark.parametrize("cut", [CUT, CutSettings(64, 16), CutSettings(64, 8, "[{source}]\n")])
@pytest.mark.parametrize("kind", ["text", "markdown", "rst", "code"])
def test_the_chunks_are_the_same(kind: Kind, cut: CutSettings, cutter: DocumentCutter, encoder: TextEncoder) -> None:
    for given in (
        document(TEXT, kind),
        document(TEXT, kind, Mark(0, "page 1", 3), Mark(50, "page 2", 9)),
        document(TEXT, kind, *(Mark(at, f"record {at}") for at in range(0, 900, 90)), apart=True),
    ):
        assert list(cutter.cut(given, cut)) == list(cut_document(given, encoder.encode, cut))


def test_a_long_document_comes_in_batches(cutter: DocumentCutter, encoder: TextEncoder) -> None:
    long = document(TEXT * 200)
    found = cutter.cut(long, CUT)
    first = next(found)
    assert cutter._idle == type(cutter._idle)(), "the process works on"
    assert [first, *found] == list(cut_document(long, encoder.encode, CUT))
    assert len(cutter._idle) == 1


def test_a_short_document_needs_no_process(encoder: TextEncoder) -> None:
    cutter = DocumentCutter(encoder)
    assert list(cutter.cut(document(), CUT)) == list(cut_document(document(), encoder.encode, CUT))
    assert not cutter._idle


def test_a_process_is_used_again_and_two_are_kept(cutter: DocumentCutter) -> None:
    list(cutter.cut(document(), CUT))
    [process] = [limited._process for limited in cutter._idle]
    list(cutter.cut(document(), CUT))
    assert [limited._process for limited in cutter._idle] == [process] != [None]
    together = [cutter.cut(document(), CUT) for _ in range(3)]
    assert all(next(chunks) for chunks in together)
    assert len({tuple(chunks) for chunks in together}) == 1
    assert len(cutter._idle) == 2


def test_a_refused_text_is_refused(cutter: DocumentCutter) -> None:
    model = tokenizers.models.WordLevel({"a": 0, "<x>": 1}, unk_token="<x>")
    encoder = TextEncoder(tokenizers.Tokenizer(model), {1: "<x>"}, 2)
    own, refused = DocumentCutter(encoder), document("unknown")
    for chunks in (cut_document(refused, encoder.encode, CUT), own.cut(refused, CUT)):
        with pytest.raises(TextRefused, match="contains '<x>', which this tokenizer cannot keep apart") as error:
            list(chunks)
        assert error.value.hint == "remove it from the text, or choose another model"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (CutLimits(seconds=0.05, seconds_per_mib=0), "takes more than 0 s to cut"),
        (CutLimits(memory=48 * MIB, memory_per_byte=0), "needs more than 48 MiB of memory to cut"),
    ],
)
def test_a_document_beyond_a_limit_is_skipped(
    limits: CutLimits, reason: str, cutter: DocumentCutter, encoder: TextEncoder
) -> None:
    limited = DocumentCutter(encoder, limits)
    with pytest.raises(NotConverted, match=reason):
        list(limited.cut(document("# a\n" * 200_000, "markdown"), CUT))
    limited._limits = CutLimits()
    assert list(limited.cut(document(), CUT)) == list(cut_document(document(), encoder.encode, CUT))


def test_a_process_that_is_killed_is_a_reason(cutter: DocumentCutter, monkeypatch: pytest.MonkeyPatch) -> None:
    list(cutter.cut(document(), CUT))
    with killed_at_work(cutter._idle[-1], monkeypatch), pytest.raises(NotConverted, match=r"crashed \(signal 9\)"):
        list(cutter.cut(document(), CUT))
    assert list(cutter.cut(document(), CUT))


def test_a_cancelled_document_ends_its_process(cutter: DocumentCutter) -> None:
    cancellation = Cancellation()
    chunks = cutter.cut(document(TEXT * 2000), CUT, cancellation)
    next(chunks)
    cancellation.cancel()
    with pytest.raises(Cancelled):
        list(chunks)
    with pytest.raises(Cancelled):
        next(cutter.cut(document(), CUT, cancellation))
    assert list(cutter.cut(document(), CUT, Cancellation()))


def test_chunks_that_nobody_reads_end_the_process(cutter: DocumentCutter) -> None:
    chunks = cutter.cut(document(TEXT * 2000), CUT)
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    assert cutter._idle[-1]._process is None
    assert list(cutter.cut(document(), CUT))


def test_a_lone_surrogate_is_refused_in_both_ways(cutter: DocumentCutter, encoder: TextEncoder) -> None:
    broken = document("a \ud800 b")
    found = []
    for chunks in (cut_document(broken, encoder.encode, CUT), cutter.cut(broken, CUT)):
        with pytest.raises(TextRefused) as error:
            list(chunks)
        found.append(error.value.message)
    assert found[0] == found[1]


def test_the_cutting_process_imports_no_heavy_libraries() -> None:
    code = (
        "import sys, cacheblend_cli.corpus.cut_process as c\n"
        "assert not {'torch', 'transformers', 'numpy', 'jinja2'} & set(sys.modules), sys.modules"
    )
    run([sys.executable, "-c", code], check=True)


def test_token_ids_are_shared_objects(cutter: DocumentCutter) -> None:
    chunks = list(cutter.cut(document(TEXT * 4), CUT))
    ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert len({id(token_id) for token_id in ids}) == len(set(ids))
