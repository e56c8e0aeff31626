"""Search in other forms of the words of pages: inflected, compounds, figures without separators; long messages."""

# ruff: noqa: RUF001

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from cacheblend_store import ChunkStore
from stored_texts import put_document

from cacheblend_cli.corpus.embedding import find_embedder
from cacheblend_cli.corpus.ranking import has_telling_words, questions_in
from cacheblend_cli.corpus.search import Lookup, search

LANGUAGES = Path(__file__).parents[2] / "study" / "search_languages.jsonl"
PAGES = {
    "grant": "The grant of Kaldur is 1,250,000 kroner. The committee meets at 10:30 am.",
    "switch": "The switch in the cellar has the address 00:1B:44:11:3A:B7.",
    "care": "A child may stay in the canteen. A person of the kitchen is there.",
    "garage": "The barrier of the garage opens with a badge. It closes at 10 pm.",
    "vpn": "Passwords expire after 180 days. The gateway has port 4433.",
}
MESSAGE = (
    "Dear all, last week we met in the harbour office about the new boats, the cranes and the weather. Many colleagues "
    "from transport came by train, the lunch in the canteen was good although the coffee was cold, and afterwards we "
    "walked along the quay and spoke about the summer, the garden and the long winter that is behind us. Somebody asked "
    "about the laptops, which are slow, and about the printers in the cellar, which are out of paper again. {} Kind regards"
)
HOW = [
    pytest.param("words", id="words"),
    pytest.param("both", id="both", marks=pytest.mark.skipif(find_spec("wordllama") is None, reason="needs wordllama")),
]


@pytest.fixture(params=HOW)
def how(request: pytest.FixtureRequest) -> Lookup:
    return Lookup(5, by=request.param, embedder=None if request.param == "words" else find_embedder())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store", mode="write") as opened:
        for name, text in PAGES.items():
            put_document(opened, f"/{name}.md", text)
        yield opened


def test_inflected_questions_in_many_languages(tmp_path: Path, how: Lookup) -> None:
    """The right page is first; few good matches are called weak, and no question about something else passes."""
    num_first = num_weak = num_questions = 0
    passed = list[str]()
    rows = [json.loads(line) for line in LANGUAGES.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        with ChunkStore.open(tmp_path / row["language"], mode="write") as store:
            for page, text in row["pages"].items():
                put_document(store, f"/{page}.md", text)
            for question, page in row["questions"]:
                found = search(store, question, how)
                num_first += [hit.source for hit in found.hits[:1]] == [f"/{page}.md"]
                num_weak += found.weak
            num_questions += len(row["questions"])
            passed += [question for question in row["others"] if not search(store, question, how).weak]
    assert len(rows) >= 10
    assert num_first >= 0.97 * num_questions
    assert num_weak <= (0.22 if how.by == "words" else 0.1) * num_questions
    assert passed == []


@pytest.mark.parametrize(
    ("question", "page"),
    [
        ("Who gets 1250000?", "grant"),
        ("Who gets 1'250'000?", "grant"),
        ("What is at 10:30am?", "grant"),
        ("Where is 001B44113AB7?", "switch"),
        ("Where is 00-1b-44-11-3a-b7?", "switch"),
        ("Where are the children?", "care"),
        ("Are people there?", "care"),
        ("When do garage doors close?", "garage"),
        ("After how many days do passwords expire?", "vpn"),
        (MESSAGE.format("My question: after how many days do passwords expire?"), "vpn"),
        (MESSAGE.format("Please tell me when passwords expire."), "vpn"),
    ],
)
def test_other_forms_of_the_words_are_found(store: ChunkStore, how: Lookup, question: str, page: str) -> None:
    found = search(store, question, how)
    assert (found.hits[0].source, found.weak) == (f"/{page}.md", False)


def test_a_long_message_about_something_else_is_weak(store: ChunkStore, how: Lookup) -> None:
    assert search(store, MESSAGE.format("My question: what is the capital of Mongolia?"), how).weak


@pytest.mark.parametrize(
    ("message", "questions"),
    [
        ("Who leads billing?", []),
        ("Hello. Who leads billing? Thanks.", ["Who leads billing?"]),
        ("He asks: who leads 2.5 teams? Thanks.", ["who leads 2.5 teams?"]),
        ("こんにちは。誰が責任者ですか？よろしく。", ["誰が責任者ですか？"]),
        ("مرحبا. من المسؤول؟ شكرا.", ["من المسؤول؟"]),
        ("Γεια σας. Ποιος έχει το κλειδί; Ευχαριστώ.", ["Ποιος έχει το κλειδί;"]),
        ("One. Two. Tell me who leads billing. Thanks.", ["Tell me who leads billing.", "Thanks."]),
    ],
)
def test_the_questions_of_a_message(message: str, questions: list[str]) -> None:
    assert questions_in(message) == questions


@pytest.mark.parametrize("text", ["What can you do?", "Was kannst du?", "Что ты можешь?"])
def test_a_question_of_function_words_has_no_telling_words(text: str) -> None:
    assert not has_telling_words(text)
    assert has_telling_words(f"{text} Kaldur")


def test_passages_beyond_k_that_match_as_well_are_counted(store: ChunkStore, how: Lookup) -> None:
    def num_more(question: str, k: int) -> int:
        return search(store, question, replace(how, k=k)).num_more

    for number in range(9):
        aid = "There is no ladder." if number > 6 else "A ladder hangs beside the gate."
        put_document(store, f"/depot-{number}.md", f"# Depot {number}\n\nDepot {number} has a clerk. {aid}")
    assert num_more("At which depots does a ladder hang beside the gate?", 5) == 2
    assert num_more("At which depots does a ladder hang beside the gate?", 7) == 0
    assert num_more("After how many days do passwords expire?", 1) == 0
    assert num_more("What is the capital of Mongolia?", 1) == 0
