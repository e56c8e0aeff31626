"""Search in scripts other than Latin: Hangul with particles, scripts without blanks, vowel signs."""

from __future__ import annotations

import sqlite3
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from cacheblend_store import ChunkStore
from hypothesis import given
from hypothesis import strategies as st
from stored_texts import put_document as put

from cacheblend_cli.corpus.normalise import fts5_tokenizer, indexed, normalised, search_words, unspaced
from cacheblend_cli.corpus.ranking import query_terms
from cacheblend_cli.corpus.search import Lookup, search
from cacheblend_cli.corpus.similarity import TfIdf

PAGES = {
    "ko-office": "서울에서 열린 회의의 예산은 4417만 원입니다. 담당자는 김민수입니다.",
    "ko-leave": "부산 지사의 휴가 규정입니다. 그는 집에서 울었다. 산에서 예를 들었다.",
    "ko-store": "제주 창고의 열쇠는 경비실에 있습니다. 이민수 씨는 SK하이닉스 IT부서에서 2024년에 왔습니다.",
    "th-office": "สำนักงานใหญ่อยู่ที่กรุงเทพมหานคร รหัสประตูคือ 4417",
    "th-leave": "พนักงานสามารถลาพักร้อนได้ปีละสิบวัน โดยต้องแจ้งล่วงหน้าหนึ่งสัปดาห์",
    "th-rooms": "ห้องประชุมใหญ่อยู่ชั้นสาม น้ำดื่มอยู่ในครัว ใช้ Wi-Fi ได้ทั่วประเทศไทย",
    "lo-office": "ສຳນັກງານໃຫຍ່ຕັ້ງຢູ່ນະຄອນຫຼວງວຽງຈັນ ລະຫັດປະຕູແມ່ນ 4417",
    "lo-leave": "ພະນັກງານສາມາດລາພັກໄດ້ສິບວັນຕໍ່ປີ ນ້ຳດື່ມຢູ່ໃນຄົວ",
    "km-office": "ការិយាល័យកណ្តាលនៅរាជធានីភ្នំពេញ លេខកូដទ្វារគឺ 4417",
    "km-leave": "បុគ្គលិកអាចឈប់សម្រាកបានដប់ថ្ងៃក្នុងមួយឆ្នាំ",
    "my-office": "ရုံးချုပ်သည် ရန်ကုန်မြို့တွင် တည်ရှိသည်။ တံခါးကုဒ်မှာ 4417 ဖြစ်သည်။",
    "my-leave": "ဝန်ထမ်းများသည် တစ်နှစ်လျှင် ဆယ်ရက် ခွင့်ယူနိုင်သည်။",
    "hi-office": "मुख्यालय दिल्ली में है। दरवाज़े का कोड 4417 है।",
    "hi-leave": "कर्मचारी साल में दस दिन की छुट्टी ले सकते हैं।",
    "bo-office": "བོད་ཡིག་གི་དཔེ་ཆ་འདི་ལྷ་སར་ཡོད།",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path_factory.mktemp("scripts") / "store", mode="write") as opened:
        for name, text in PAGES.items():
            put(opened, f"/pages/{name}.txt", text + "\n")
        yield opened


def found(store: ChunkStore, query: str) -> list[str]:
    return [Path(hit.source).stem for hit in search(store, query, Lookup(9)).hits]


@pytest.mark.parametrize(
    ("query", "page"),
    [
        *[(query, "ko-office") for query in ("서울", "예산", "회의", "담당자", "서울의 회의")],
        *[("휴가", "ko-leave"), ("부산", "ko-leave"), ("열쇠", "ko-store"), ("하이닉스", "ko-store")],
        *[("부서", "ko-store"), ("2024년", "ko-store"), ("집", "ko-leave"), ("원", "ko-office")],
        *[(query, "th-office") for query in ("กรุงเทพ", "รหัส", "กรุงเทพมหานคร")],
        *[("ลาพักร้อน", "th-leave"), ("น้ำ", "th-rooms"), ("นํ้า", "th-rooms"), ("ครัว", "th-rooms")],
        *[("ວຽງຈັນ", "lo-office"), ("ລະຫັດ", "lo-office"), ("ລາພັກ", "lo-leave"), ("ນ້ຳ", "lo-leave")],
        *[("ភ្នំពេញ", "km-office"), ("ទ្វារ", "km-office"), ("ថ្ងៃ", "km-leave")],
        *[("ရန်ကုန်", "my-office"), ("တံခါး", "my-office"), ("ခွင့်", "my-leave")],
        *[("दिल्ली", "hi-office"), ("कोड", "hi-office"), ("छुट्टी", "hi-leave"), ("བོད", "bo-office")],
    ],
)
def test_a_word_finds_its_page_and_no_other(store: ChunkStore, query: str, page: str) -> None:
    assert found(store, query) == [page]


@pytest.mark.parametrize(
    ("query", "page"),
    [
        *[
            ("서울에서는", "ko-office"),
            ("4417만", "ko-office"),
            ("회의가 서울에서 열렸습니까?", "ko-office"),
            ("김민수는 누구입니까?", "ko-office"),
        ],
        *[("창고의 열쇠는 어디에 있습니까?", "ko-store"), ("휴가는 며칠입니까?", "ko-leave"), ("김민수", "ko-office")],
        *[("รหัสประตูคืออะไร", "th-office"), ("ลาพักร้อนได้กี่วัน", "th-leave"), ("ห้องประชุมอยู่ที่ไหน", "th-rooms")],
        *[("ประตู", "th-office"), ("สำนักงาน", "th-office"), ("ລະຫັດປະຕູແມ່ນຫຍັງ", "lo-office")],
        *[("លេខកូដទ្វារគឺជាអ្វី", "km-office"), ("တံခါးကုဒ်က ဘာလဲ", "my-office"), ("दरवाज़े का कोड क्या है", "hi-office")],
    ],
)
def test_a_question_ranks_its_page_first(store: ChunkStore, query: str, page: str) -> None:
    assert found(store, query)[0] == page


def test_a_phrase_does_not_go_on_in_the_next_korean_word(store: ChunkStore) -> None:
    """The page with 집에서 울었다 has the syllables of 서울 side by side."""
    assert "ko-leave" not in found(store, "서울")


def test_decomposed_hangul_and_invisible_blanks_are_found(store: ChunkStore) -> None:
    assert found(store, unicodedata.normalize("NFD", "서울")) == ["ko-office"]
    assert found(store, "กรุง\u200bเทพ") == ["th-office"]
    put(store, "/pages/nfd.txt", unicodedata.normalize("NFD", "대전에는 공장이 있습니다.\n"))
    put(store, "/pages/marked.txt", "เชียง\u200bใหม่\n")
    assert found(store, "대전") == ["nfd"]
    assert found(store, "เชียงใหม่") == ["marked"]


def test_a_snippet_shows_the_words_around_the_match(store: ChunkStore) -> None:
    [hit] = search(store, "예산", Lookup(1)).hits
    assert hit.snippet == PAGES["ko-office"]
    [hit] = search(store, "กรุงเทพ", Lookup(1)).hits
    assert hit.snippet == PAGES["th-office"]


def test_the_first_syllables_of_a_korean_word_weigh_most() -> None:
    assert query_terms("서울에서") == {'"서 울"': 1, '"울 에"': 1 / 2, '"에 서"': 1 / 3}
    assert list(query_terms("QA부서 3월")) == ['"qa"', '"부 서"', '"3"', '"월"']
    assert list(query_terms("คือ 4417abc")) == ['"คื อ"', '"4417abc"']
    assert list(query_terms("図書館は QA部")) == ['"図"', '"書"', '"館"', '"は"', '"qa"', '"部"']


def test_neighbours_are_similar_in_words_of_the_script() -> None:
    texts = ["รหัสประตูคือ 1", "พนักงานลาพักร้อนได้", "ประตูหลังมีรหัส", "서울에서 회의", "부산에서 회사", "서울은 크다"]
    similarity = TfIdf(texts)
    assert similarity.nearest(0, 1) == [2]
    assert similarity.nearest(3, 1) == [5]


LETTERS = st.sampled_from(
    [*"aé 9.\n'", "서", "울", "ก", "ำ", "ั้", "ខ្", "မြ", "कि", "漢", "が", "\ufe0f", "\u00b4", "\u0301", "ﬃ", "\u200b"]
)


@given(st.lists(LETTERS, max_size=20))
def test_blanks_put_into_a_text_are_taken_out_again(parts: list[str]) -> None:
    text = "".join(parts)
    assert unspaced(indexed(text)) == normalised(text)


@given(st.text(st.sampled_from("aZäöüßé09 .,'-_\n\u00b4\u00a8\u0301\u0332\ufe0f\u20d7\u00ad漢かーй☕"), max_size=40))
def test_words_of_other_scripts_are_those_of_plain_unicode61(text: str) -> None:
    with sqlite3.connect(":memory:") as db:
        tokens = [tokens_of(db, name, text) for name in ("porter unicode61", fts5_tokenizer())]
    assert tokens[0] == tokens[1]
    assert all(weight == 1 for _, weight in search_words(normalised(text)))


def tokens_of(db: sqlite3.Connection, tokenizer: str, text: str) -> list[tuple[str, int]]:
    for table in ("words", "texts"):
        db.execute(f"DROP TABLE IF EXISTS {table}")
    db.execute(f'CREATE VIRTUAL TABLE texts USING fts5(text, tokenize = "{tokenizer}")')
    db.execute("CREATE VIRTUAL TABLE words USING fts5vocab(texts, instance)")
    db.execute("INSERT INTO texts VALUES (?)", (indexed(text),))
    return db.execute("SELECT term, offset FROM words ORDER BY offset").fetchall()
