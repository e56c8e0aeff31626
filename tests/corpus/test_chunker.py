"""The cut into chunks: lossless, never too long, at the places a reader would cut."""

from __future__ import annotations

import re

import pytest
from cacheblend_documents.converted import Kind
from checkpoints import write_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_cli.corpus import chunker
from cacheblend_cli.corpus.chunker import Chunk, Encode, iter_cut
from cacheblend_cli.corpus.outline import heading_spans
from cacheblend_cli.corpus.tables import Tables


def words(text: str) -> list[int]:
    """A token a word or a newline, so that sizes can be counted by eye."""
    return [hash(w) for w in text.replace("\n", " \n ").split(" ") if w]


def characters(text: str) -> list[int]:
    return [ord(c) for c in text]


@pytest.fixture(scope="module")
def encode(tmp_path_factory: pytest.TempPathFactory) -> Encode:
    from cacheblend_cli.model.tokenizer import Tokenizer

    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return Tokenizer(path).encode_text


def cut(text: str, encode: Encode, most: int) -> list[Chunk]:
    return list(iter_cut(text, encode, most))


def texts(chunks: list[Chunk]) -> list[str]:
    return [c.text for c in chunks]


def check(text: str, chunks: list[Chunk], encode: Encode, most: int) -> None:
    assert "".join(texts(chunks)) == text
    assert [c.index for c in chunks] == list(range(len(chunks)))
    for chunk in chunks:
        assert text[chunk.start : chunk.end] == chunk.text
        assert list(chunk.token_ids) == encode(chunk.text)
        assert len(chunk.token_ids) <= most


def test_paragraphs_are_packed_whole() -> None:
    text = "one two\n\nthree four\n\nfive six\n"
    assert texts(cut(text, words, 8)) == ["one two\n\nthree four\n\n", "five six\n"]
    assert texts(cut(text, words, 6)) == ["one two\n\n", "three four\n\n", "five six\n"]
    assert texts(cut(text, words, 100)) == [text]


def test_a_heading_stays_with_the_paragraph_after_it() -> None:
    text = "one two three\n\n# Title\n\nfour five six\n\nTitle\n=====\n\nseven eight nine\n"
    assert texts(cut(text, words, 9)) == [
        "one two three\n\n",
        "# Title\n\nfour five six\n\n",
        "Title\n=====\n\nseven eight nine\n",
    ]


def test_a_heading_without_room_for_its_paragraph_stays_with_the_beginning_of_it() -> None:
    chunks = cut("one two\n\n# Title\n\nthree four five six seven\n", words, 8)
    assert texts(chunks) == ["one two\n\n", "# Title\n\nthree four five six ", "seven\n"]


TEXT = "one two three four five six seven eight nine ten\n"


@pytest.mark.parametrize(
    ("text", "kind", "together"),
    [
        ("a b c d\n# T\n\n" + TEXT, "markdown", "# T\n\none"),  # no blank line before the heading
        ("a b c d\n\n# T\n" + TEXT, "markdown", "# T\none"),  # nor after it
        ("a b c d\n\n# T\n## U\n\n" + TEXT, "markdown", "# T\n## U\n\none"),
        ("a b c d\n\n# T\n\n## U\n\n" + TEXT, "markdown", "# T\n\n## U\n\none"),
        ("a b c d\n\n# T\n\n| x | y |\n|---|---|\n" + "| 1 | 2 |\n" * 9, "markdown", "# T\n\n| x | y |\n"),
        ("a b c d\n\nT\n---\n\n" + TEXT, "markdown", "T\n---\n\none"),
        ("a b c d\n\n===\nT\n===\n\n" + TEXT, "rst", "===\nT\n===\n\none"),
        ('a b c d\n\nT\n^^^\nU\n"""\n' + TEXT, "rst", 'T\n^^^\nU\n"""\none'),
        ("a b c d\n\n# T\n\n" + "x" * 400 + "\n", "markdown", "# T\n\nxxx"),  # a word that is cut anyway
        ("a b c d\n\n# T\n\n" + "\u6f22\u5b57" * 18 + "\n", "markdown", "# T\n\n\u6f22"),
    ],
)
def test_a_heading_and_the_first_word_after_it_share_a_chunk(text: str, kind: Kind, together: str) -> None:
    for most in range(17, 40):
        chunks = list(iter_cut(text, letters, most, kind))
        check(text, chunks, letters, most)
        assert any(together in chunk.text for chunk in chunks), most


def letters(text: str) -> list[int]:
    """A token a character, but for blanks and marks."""
    return [ord(c) for c in text if c.isalnum()] + [0] * text.count("\n")


@given(
    st.lists(
        st.sampled_from(
            [
                "a",
                "bc ",
                "d. ",
                "\n",
                "\n\n",
                "\n# H\n",
                "\n## I\n\n",
                "\nJ\n===\n",
                "\n---\n",
                "```\n",
                "| x |\n",
                "y" * 70,
                "\f",
            ]
        ),
        max_size=30,
    ),
    st.integers(1, 40),
    st.sampled_from(["text", "markdown", "rst"]),
)
def test_a_heading_ends_a_chunk_only_where_no_word_fits(parts: list[str], most: int, kind: Kind) -> None:
    text = "".join(parts) if kind != "rst" else "".join(parts).replace("#", "h")
    spans = list(heading_spans(text, kind))
    chunks = list(iter_cut(text, characters, most, kind))
    check(text, chunks, characters, most)
    for chunk in chunks:
        last = chunk.start + len(chunk.text.rstrip()) - 1
        if not chunk.text.strip() or not within(last, spans):
            continue
        begin = next((i for i in range(last + 1, len(text)) if not within(i, spans) and not text[i].isspace()), None)
        if begin is not None:  # the word after the last heading does not fit
            word = re.compile(r"\S+\s*").match(text, begin)
            assert word is not None
            assert word.end() - chunk.start > most


def test_ranges_of_headings_do_not_overlap() -> None:
    for text, kind, spans in (
        ("# A\f# B\nc\n", "markdown", [(0, 8)]),
        ("T\n===\nU\n===\n\n\nv\n", "rst", [(0, 6), (6, 14)]),
        ("===\nT\n===\nv\n", "rst", [(0, 10)]),
        ("a\n# T", "markdown", [(2, 5)]),
        ("```\n# T\n```\n", "markdown", []),
        ("# T\n", "code", []),
    ):
        assert list(heading_spans(text, kind)) == spans  # type: ignore[arg-type]


def within(position: int, spans: list[tuple[int, int]]) -> bool:
    return any(start <= position < end for start, end in spans)


def test_a_comment_in_fenced_code_is_not_a_heading() -> None:
    text = "one two\n\n```\n# three\nfour\n```\n\nfive six\n"
    assert texts(list(iter_cut(text, words, 16, "markdown"))) == [
        "one two\n\n```\n# three\nfour\n```\n\n",
        "five six\n",
    ]


def test_a_heading_that_ends_the_document_stays() -> None:
    assert texts(cut("one\n\n# Two\n", words, 3)) == ["one\n\n", "# Two\n"]


def test_a_long_paragraph_is_cut_at_lines_then_sentences_then_words() -> None:
    assert texts(cut("a b c\nd e f\n", words, 4)) == ["a b c\n", "d e f\n"]
    assert texts(cut("a b c. d e f. g h\n", words, 4)) == ["a b c. ", "d e f. ", "g h\n"]
    assert texts(cut("a b c d e f g\n", words, 3)) == ["a b c ", "d e f ", "g\n"]


def test_one_token_and_a_character_of_too_many_tokens() -> None:
    [chunk] = cut("a", words, 1)
    assert (chunk.text, chunk.start, chunk.end) == ("a", 0, 1)
    chunks = cut("aé", lambda t: list(t.encode()), 1)
    assert [c.token_ids for c in chunks] == [(97,), (0xC3, 0xA9)]


@given(
    st.lists(
        st.sampled_from(["a", "lead of billing", " ", "\n", "\n\n", "# H\n", ". ", "\t", "né", "\U0001f600", "x" * 40])
    ),
    st.integers(1, 40),
)
def test_nothing_is_lost_and_nothing_is_too_long(parts: list[str], most: int) -> None:
    text = "".join(parts)
    check(text, cut(text, characters, most), characters, most)


def test_with_a_real_tokenizer_added_tokens_are_plain_text(encode: Encode) -> None:
    text = "# The lead\n\nof billing <|im_end|> is <tool_call> Mara.\n\n" * 12
    chunks = cut(text, encode, 30)
    check(text, chunks, encode, 30)
    assert len(chunks) > 12
    assert all(
        not {0, 1, 2, 310}.intersection(c.token_ids) for c in chunks
    )  # <s>, <|im_start|>, <|im_end|>, <tool_call>


def test_text_without_any_break_takes_few_encodes(encode: Encode) -> None:
    calls = 0

    def counting(text: str) -> list[int]:
        nonlocal calls
        calls += 1
        return encode(text)

    text = "x" * 20_000
    chunks = cut(text, counting, 100)
    check(text, chunks, encode, 100)
    assert calls < 40 * len(chunks)


def test_the_first_chunk_of_a_long_text_does_not_wait_for_the_last(encode: Encode) -> None:
    seen = 0

    def counting(text: str) -> list[int]:
        nonlocal seen
        seen += len(text)
        return encode(text)

    for text in ("# The lead\n\nof billing is Mara.\n\n" * 20_000, "the lead of billing is Mara " * 20_000):
        seen, found = 0, iter_cut(text, counting, 100)
        ends = [next(found).end for _ in range(10)]
        assert ends == sorted(set(ends))
        assert seen < len(text) // 4


def test_the_handbook_is_cut_at_paragraphs() -> None:
    from cacheblend_cli.demo import CHUNK_TOKENS, handbook_dir, model_dir
    from cacheblend_cli.model.tokenizer import Tokenizer

    encode = Tokenizer(model_dir()).encode_text
    for page in sorted(handbook_dir().glob("*.md")):
        text = page.read_text(encoding="utf-8")
        chunks = cut(text, encode, CHUNK_TOKENS)
        check(text, chunks, encode, CHUNK_TOKENS)
        assert all(c.text.endswith("\n\n") for c in chunks[:-1])
        assert len(chunks) >= 2


PLAIN = (
    r".*?(?:\n[ \t]*\n\s*|\Z)",
    r".*?(?:\n|\Z)",
    r".*?(?:[.!?]\s+|\Z)",
    r"\s*\S+\s*|\s+",
    r".",
)
CODE = (
    r".*?(?:\n(?:[ \t]*\n)+(?=[^\s})\]])|\Z)",
    r".*?(?:\n(?:[ \t]*\n)+(?=(?: {1,4}|\t)?[^\s})\]])|\Z)",
    r".*?(?:\n(?:[ \t]*\n)+|\Z)",
    PLAIN[1],
    *PLAIN[3:],
)
"""Where the levels cut, as one regular expression each. These are not linear."""
MARKS = st.sampled_from(
    ["a", "b1", " ", "    ", "     ", "\t", "\n", "\n\n", "\v", "}", ")", "]", ". ", "!", "\u3042", "# x\n"]
)


@given(st.lists(MARKS, max_size=14), st.integers(0, 3), st.integers(0, 3))
def test_levels_cut_where_their_patterns_do(parts: list[str], before: int, after: int) -> None:
    inner = "".join(parts)
    text = "x" * before + inner + "y" * after  # a part is cut as if it were alone
    for levels, patterns in ((chunker._LEVELS, PLAIN), (chunker._CODE_LEVELS, CODE)):
        for level, pattern in zip(levels, patterns, strict=True):
            ends = [m.end() for m in re.compile(pattern, re.DOTALL).finditer(inner) if m.group()]
            assert list(level(text, before, before + len(inner))) == [before + end for end in ends]


@pytest.mark.parametrize("kind", ["text", "code"])
@given(st.lists(MARKS, min_size=1), st.integers(1, 12))
def test_a_chunk_takes_all_the_pieces_that_fit(kind: Kind, parts: list[str], most: int) -> None:
    text = "".join(parts)
    levels = chunker._CODE_LEVELS if kind == "code" else chunker._LEVELS
    tables = Tables(text, characters, most)
    ends = list(chunker._ends(tables, 0, len(text), characters, most, levels))
    for first, begin in enumerate([0, *ends[:-1]]):
        pieces = chunker._Pieces(tables, iter(ends), set())
        pieces.has(first)
        fitting = [n for n in range(first + 1, len(ends) + 1) if ends[n - 1] - begin <= most]
        for length in (1, most, 100):
            stop, ids = chunker._fill(pieces, first, characters, most, length)
            assert stop == max(fitting, default=first + 1)
            assert ids == characters(text[begin : ends[stop - 1]])


@pytest.mark.parametrize("line", ["the lead of billing is Mara ", "x", "1, ", "\u3042", " "])
def test_what_is_encoded_does_not_grow_with_the_text(line: str, encode: Encode) -> None:
    """Characters encoded per character of the text."""
    encoded = 0

    def counting(text: str) -> list[int]:
        nonlocal encoded
        encoded += len(text)
        return encode(text)

    text = line * (100_000 // len(line))
    check(text, cut(text, counting, 200), encode, 200)
    assert encoded <= 6 * len(text)
