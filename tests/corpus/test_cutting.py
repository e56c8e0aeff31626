"""Documents to chunks: at headings and definitions, parts apart, with overlap, and with {source} before each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from cacheblend_documents.converted import Converted, Kind, Mark
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_cli.corpus.chunker import Chunk, iter_cut
from cacheblend_cli.corpus.cutting import CutSettings, cut_document
from cacheblend_cli.corpus.documents import Document
from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.wording import Wording, check_prompt


def words(text: str) -> list[int]:
    """A token a word or a newline, so that sizes can be counted by eye."""
    return [sum(w.encode()) for w in text.replace("\n", " \n ").split(" ") if w]


def characters(text: str) -> list[int]:
    return [ord(c) for c in text]


def texts(chunks: Iterable[Chunk]) -> list[str]:
    return [c.text for c in chunks]


def chunks_of(text: str, how: CutSettings, **about: Any) -> list[Chunk]:
    return list(cut_document(Document("/d/a.md", Converted(text, **{"kind": "markdown", **about})), words, how))


def test_a_chunk_that_is_half_full_ends_before_a_heading() -> None:
    text = "# A\n\none two three four\n\nfive six\n\n# B\n\nseven\n\neight nine ten\n"
    assert texts(iter_cut(text, words, 19)) == [
        "# A\n\none two three four\n\nfive six\n\n",
        "# B\n\nseven\n\neight nine ten\n",
    ]
    early = "# A\n\none\n\n# B\n\ntwo three four five six seven\n\neight\n"
    assert texts(iter_cut(early, words, 20)) == ["# A\n\none\n\n# B\n\ntwo three four five six seven\n\n", "eight\n"]


CODE = '''import os


def first(x):
    a = 1

    return a


class Second:
    """Two."""

    def one(self):
        return 1

    def two(self):
        b = 2

        return b
'''


def test_code_is_cut_between_definitions() -> None:
    whole = texts(iter_cut(CODE, characters, 110, "code"))
    assert [text.split("\n")[0] for text in whole] == ["import os", "class Second:", "    def two(self):"]
    small = texts(iter_cut(CODE, characters, 60, "code"))
    assert "".join(small) == CODE
    assert "    def one(self):\n        return 1\n\n" in "".join(small[2:4])
    assert any(text.startswith("    def two(self):\n        b = 2") for text in small)


@given(
    st.lists(st.sampled_from(["a", "word. ", "\n", "\n\n", "# H\n", "def f():\n", "    ", "né", "x" * 30, "}\n"])),
    st.integers(4, 40),
    st.integers(0, 20),
    st.sampled_from(["text", "markdown", "rst", "code"]),
    st.booleans(),
)
def test_nothing_is_lost_and_nothing_is_too_long(
    parts: list[str], most: int, overlap: int, kind: Kind, head: bool
) -> None:
    text, overlap = "".join(parts), min(overlap, most // 2)
    document = Document("/d/a.md", Converted(text, kind))
    end = 0
    for chunk in cut_document(document, characters, CutSettings(most, overlap, "[{source}]\n" if head else "")):
        body = text[chunk.start : chunk.end]
        assert chunk.text.endswith(body)
        assert list(chunk.token_ids) == characters(chunk.text)
        assert len(chunk.token_ids) <= most
        assert end - overlap <= chunk.start <= end < chunk.end
        assert head or chunk.text == body
        end = chunk.end
    assert end == len(text)


def test_an_overlap_is_whole_sentences_else_words() -> None:
    text = "one two three. four five. six seven eight. nine ten.\n"
    found = chunks_of(text, CutSettings(8, 3))
    assert texts(found) == [
        "one two three. four five. ",
        "four five. six seven eight. ",
        "six seven eight. nine ten.\n",
    ]
    assert all(text[c.start : c.end] == c.text for c in found)
    words_only = texts(chunks_of("one two three four five six\n", CutSettings(4, 2)))
    assert words_only == ["one two ", "one two three four ", "three four five ", "four five six\n"]
    assert texts(chunks_of(text, CutSettings(8, 0)))[1] == "nine ten.\n"


def test_parts_that_stay_apart_share_no_chunk_and_no_overlap() -> None:
    marks = Mark(0, "record 1", 1), Mark(6, "record 2", 2)
    found = chunks_of("one.\n\ntwo.\n\n", CutSettings(50, 10), keeps_lines=False, marks=marks, is_split=True)
    assert [(c.text, c.locator.text) for c in found] == [
        ("one.\n\n", "record 1, line 1"),
        ("two.\n\n", "record 2, line 2"),
    ]


def test_the_source_stands_before_each_chunk_and_counts() -> None:
    text = "# Travel\n\n## Refunds\n\n" + "word " * 30 + "\n"
    found = chunks_of(text, CutSettings(24, 0, "[{source}]\n"))
    assert len(found) > 1
    assert found[0].text.startswith("[Travel > Refunds]\n# Travel\n\n## Refunds\n")
    assert all(c.text.startswith("[Travel > Refunds]\nword") for c in found[1:])
    assert all(len(c.token_ids) <= 24 for c in found)
    assert "".join(text[c.start : c.end] for c in found) == text
    titled = chunks_of("text\n", CutSettings(24, 0, "[{source}]\n"), kind="text", title="Travel rules")
    assert titled[0].text == "[Travel rules]\ntext\n"
    assert chunks_of("text\n", CutSettings(24, 0, "[{source}]\n"))[0].text == "[a.md]\ntext\n", (
        "a file without titles has its name"
    )


def test_a_source_that_takes_too_much_loses_its_outer_titles() -> None:
    text = "# A very long title of many words\n\n## Short\n\ntext\n"
    assert chunks_of(text, CutSettings(16, 0, "[{source}]\n"))[-1].text.startswith("[Short]\n")
    assert not chunks_of("# A title of many words\n\nx\n", CutSettings(12, 0, "[{source}]\n"))[0].text.startswith("[")


def test_a_prompt_with_source_says_what_stands_before_each_chunk() -> None:
    wording = Wording("Documents:\n\nFrom {source}:\n{chunks}\n\nQuestion: {question}")
    assert wording.head == "From {source}:\n"
    assert wording.message("CHUNKS", "WHY") == "Documents:\n\nCHUNKS\n\nQuestion: WHY"
    assert Wording("{chunks}{question}").head == ""
    assert Wording("<{source}> {chunks}{question}").message("c", "q") == "cq"
    for bad in ("{chunks} {source} {question}", "{source} {source} {chunks} {question}"):
        with pytest.raises(UsageError, match="source"):
            check_prompt(bad)
