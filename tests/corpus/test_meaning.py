"""Search by meaning: synonyms, updates of vectors, and search without weights."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cacheblend_store import ChunkStore
from stored_texts import forget, put_document

from cacheblend_cli.corpus import embedding, ranking, search_index
from cacheblend_cli.corpus.embedding import Embedder, find_embedder
from cacheblend_cli.corpus.search import Lookup, search
from cacheblend_cli.demo import office_dir
from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.settings import Settings
from cacheblend_cli.types import SearchParams

LIKE = (("money", "reimbursed", "paid"), ("trip", "travel", "voyage"), ("canteen", "food"), ("oslo", "norway"))


class ByHand:
    """A model2vec model as far as it is asked: a dimension for each group of like words."""

    def __init__(self, groups: Sequence[Sequence[str]] = LIKE) -> None:
        self.embedding = np.array(
            [len("".join(group)) for group in groups], dtype=np.float32
        )  # the weights, as far as their digest goes
        self._groups = groups

    def encode(self, texts: Sequence[str], max_length: int) -> np.ndarray:
        words = [text.lower().replace(".", " ").split() for text in texts]
        counts = [[sum(w in group for w in found) for group in self._groups] for found in words]
        return np.array(counts, dtype=np.float32)


BOTH, MEANING = (
    Lookup(9, by="both", embedder=Embedder("by hand", ByHand())),
    Lookup(9, by="meaning", embedder=Embedder("by hand", ByHand())),
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store", mode="write") as opened:
        put_document(
            opened, "/docs/staff.md", "Claims are reimbursed after travel. ", "Forms are here. ", "Ask in norway. "
        )
        put_document(opened, "/docs/desk.md", "The canteen is open. ", "Get your back pack. ")
        yield opened


def found(store: ChunkStore, query: str, how: Lookup) -> list[str]:
    return [f"{Path(h.source).stem}#{h.index}" for h in search(store, query, how).hits]


def test_synonyms_are_found_by_meaning(store: ChunkStore) -> None:
    question = "When do I get money back for a trip?"
    assert found(store, question, Lookup(9)) == ["desk#1"]
    assert found(store, question, MEANING) == ["staff#0"]
    assert set(found(store, question, BOTH)) == {"desk#1", "staff#0"}
    assert found(store, "nothing alike", MEANING) == []


def test_two_rankings_are_fused_and_a_hit_of_both_is_first(store: ChunkStore) -> None:
    put_document(store, "/docs/more.md", "A trip, money and a trip. ")
    hits = search(store, "money trip", BOTH).hits
    assert Path(hits[0].source).stem == "more"
    assert hits[0].score == pytest.approx(1.0)  # it has all the words and all of the meaning
    assert [h.score for h in hits] == sorted((h.score for h in hits), reverse=True)


def test_a_clear_win_by_words_outweighs_a_better_rank_by_meaning(store: ChunkStore) -> None:
    put_document(store, "/docs/nav.md", "Trip. Protection. ")
    put_document(store, "/docs/privacy.md", "The data protection officer for a trip in norway is Ingrid. ")
    question = "data protection officer trip"
    assert found(store, question, MEANING)[0] == "nav#0"
    assert found(store, question, BOTH)[0] == "privacy#0"


def test_of_equal_scores_the_better_word_match_is_first(store: ChunkStore) -> None:
    put_document(store, "/docs/a.md", "Zebra and " + "many other things " * 20)
    put_document(store, "/docs/b.md", "Zebra. ")
    hits = search(store, "zebra", BOTH).hits
    assert [Path(h.source).stem for h in hits] == ["b", "a"]
    assert hits[0].score == hits[1].score


def test_hits_far_below_the_best_one_are_left_out(store: ChunkStore) -> None:
    put_document(store, "/docs/more.md", "A trip, money and a trip. ", "Then home. ")
    put_document(store, "/docs/near.md", "Money for travel. ")
    for lookup in (BOTH, replace(BOTH, expand=1)):
        every, cut = search(store, "money trip", lookup), search(store, "money trip", replace(lookup, cut=True))
        names = [Path(hit.source).stem for hit in cut.hits if not hit.beside]
        assert names == ["more", "near"]  # staff#0 has the meaning alone: 0.4 of 1
        assert every.hits[0] == cut.hits[0]
        assert every.num_cut == 0
        assert cut.num_cut == sum(not hit.beside for hit in every.hits) - 2 >= 1
        assert {hit.source for hit in cut.hits if hit.beside} <= {"/docs/more.md"}
    words = Lookup(9, cut=True)
    assert search(store, "money trip", words) == search(store, "money trip", Lookup(9))


def test_a_number_that_is_set_is_the_number_of_hits() -> None:
    assert SearchParams.of(Settings()).cut
    assert SearchParams.of(Settings()).k == SearchParams.of(Settings(top_k=5)).k == 5
    assert not SearchParams.of(Settings(top_k=5)).cut


def test_the_conversation_counts_less_than_the_question(store: ChunkStore) -> None:
    put_document(store, "/docs/lease.md", "The lease of the harbor house ends in May. ")
    put_document(store, "/docs/club.md", "The chess club ends its season in June. ")
    for how in (Lookup(9), BOTH):
        follow_up = replace(how, before="Who signed the lease of the harbor house? Mara did.")
        assert found(store, "And when does it end?", follow_up)[0] == "lease#0"
        assert found(store, "When does the chess club open?", follow_up)[0] == "club#0"


@pytest.mark.parametrize(("question", "weak"), [("Reimbursed travel?", False), ("Capital of Mongolia?", True)])
@pytest.mark.parametrize("how", [Lookup(9), MEANING, BOTH])
def test_weak_matches_are_told_from_good_ones(store: ChunkStore, how: Lookup, question: str, weak: bool) -> None:
    assert search(store, question, how).weak == weak


def test_threads_search_and_embed_at_the_same_time(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    discarded = list[Path]()
    monkeypatch.setattr(search_index, "_discard", discarded.append)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            hits = list[Future[list[str]]]()
            for version in range(6):
                put_document(store, "/docs/new.md", f"A voyage . Version {version}. ")
                hits += [threads.submit(found, store, "voyage", how) for how in (BOTH, MEANING, Lookup(9)) * 8]
            assert all("new#0" in hit.result() for hit in hits)
    finally:
        sys.setswitchinterval(before)
    assert set(found(store, "voyage", MEANING)) == {"staff#0", "new#0"}
    assert not discarded  # nobody took a state between two reads for damage


def test_a_search_goes_on_when_the_index_is_made_anew_meanwhile(store: ChunkStore) -> None:
    assert found(store, "voyage", Lookup(9)) == []
    embed = ranking._embed_some

    def replaced(*args: Any) -> None:
        search_index._discard(store.path / "search.sqlite3")
        monkeypatch.undo()
        embed(*args)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ranking, "_embed_some", replaced)
        assert found(store, "voyage", MEANING) == ["staff#0"]


def test_the_vectors_follow_the_texts_and_the_weights(store: ChunkStore) -> None:
    assert found(store, "food", MEANING) == ["desk#0"]
    put_document(store, "/docs/desk.md", "Nothing is left. ", "The canteen moved. ")
    assert found(store, "food", MEANING) == ["desk#1"]
    forget(store, "one", "/docs/desk.md")
    assert found(store, "food", MEANING) == []
    other = Lookup(9, by="meaning", embedder=Embedder("others", ByHand((("food", "norway"), ("money",)))))
    assert found(store, "food", other) == ["staff#2"]
    assert found(store, "food", MEANING) == []
    (store.path / "search.sqlite3").unlink()
    assert found(store, "voyage", MEANING) == ["staff#0"]
    with sqlite3.connect(store.path / "search.sqlite3") as db:
        assert db.execute("SELECT count(*) FROM vectors").fetchone() == (3,)


@pytest.mark.parametrize("vectors", ["x''", "substr(vector, 2)", "vector || x'0000'", "'text'", "7", "NULL"])
def test_vectors_of_another_size_are_made_anew(store: ChunkStore, vectors: str) -> None:
    assert found(store, "voyage", MEANING) == ["staff#0"]
    with closing(sqlite3.connect(store.path / "search.sqlite3", isolation_level=None)) as db:
        db.execute(f"UPDATE vectors SET vector = {vectors} WHERE id = 1")
    assert found(store, "voyage", MEANING) == ["staff#0"]


def test_what_was_evicted_is_still_found(store: ChunkStore) -> None:
    [hit] = search(store, "voyage", MEANING).hits
    assert store.evict_chunks([hit.key]) == 1
    assert found(store, "voyage", MEANING) == ["staff#0"]


def test_neighbours_come_with_a_hit(store: ChunkStore) -> None:
    beside = search(store, "norway", Lookup(9, expand=1)).hits
    assert [(h.index, h.beside) for h in beside] == [(2, False), (1, True)]
    assert beside[1].snippet == "Forms are here."
    assert found(store, "norway", Lookup(9, expand=5)) == ["staff#2", "staff#1", "staff#0"]
    assert found(store, "claims norway", Lookup(9, expand=1)) in (
        ["staff#0", "staff#2", "staff#1"],
        ["staff#2", "staff#0", "staff#1"],
    )


def test_without_weights_words_are_searched_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(embedding, "find_spec", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for by, count in (("words", 0), ("auto", 0), ("meaning", 1), ("both", 1)):
        said.clear()
        assert Lookup.with_weights(SearchParams(by=by), say=said.append).by == "words"
        assert len(said) == count
    with pytest.raises(UsageError, match="model2vec"):
        Lookup.with_weights(SearchParams(by="both", embeddings="somewhere"))
    with pytest.raises(UsageError, match="feeling"):
        Lookup.with_weights(SearchParams(by="feeling"))


@pytest.mark.skipif(find_spec("model2vec") is None, reason="needs model2vec")
def test_a_directory_of_weights_is_read_and_another_one_refused(tmp_path: Path) -> None:
    from model2vec import StaticModel
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", "money", "reimbursed", "food"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    vectors = np.array([[0, 0], [1, 0], [0.9, 0.1], [0, 1]], dtype=np.float32)
    StaticModel(vectors, tokenizer).save_pretrained(tmp_path / "weights")
    embedder = find_embedder(str(tmp_path / "weights"))
    assert embedder is not None
    money, like, food, nothing = embedder.embed(["money money", "reimbursed", "food", "zzz"])
    assert money @ like > 0.9 > 0.2 > money @ food
    assert not nothing.any()
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="model2vec"):
        find_embedder(str(tmp_path / "empty"))


@pytest.mark.skipif(find_spec("wordllama") is None, reason="needs the weights of wordllama")
def test_the_weights_of_the_extra_know_that_reimbursed_is_money_back(store: ChunkStore) -> None:
    put_document(store, "/docs/travel.md", "Employees are reimbursed for travel within thirty days of a claim. ")
    put_document(store, "/docs/trips.md", "A lamp stands at the back of the long hall. ")
    how = Lookup.with_weights(SearchParams(by="meaning"))
    assert found(store, "How long until I get my money back for a trip?", how)[0] == "travel#0"


@pytest.mark.skipif(find_spec("wordllama") is None, reason="needs the weights of wordllama")
def test_the_words_of_how_many_do_not_outweigh_what_is_asked_about(tmp_path: Path) -> None:
    """In a few pages each is as rare as a name: one with "gets" and "off" came before the one about days of leave."""
    with ChunkStore.open(tmp_path / "office", mode="write") as store:
        for page in office_dir().glob("*.md"):
            put_document(store, f"/office/{page.name}", page.read_text(encoding="utf-8"))
        assert found(store, "How many days off do I get?", Lookup.with_weights(SearchParams(by="both")))[0] == "leave#0"


@pytest.mark.skipif(find_spec("wordllama") is None or find_spec("model2vec") is None, reason="needs the extra")
def test_the_weights_of_the_extra_give_the_vectors_of_model2vec() -> None:
    from model2vec import StaticModel
    from tokenizers import Tokenizer

    own = find_embedder()
    assert own is not None
    spec = find_spec("wordllama")
    assert spec is not None
    [folder] = spec.submodule_search_locations or ()
    tokenizer = Tokenizer.from_file(str(Path(folder) / embedding._WORDLLAMA[1]))
    theirs = Embedder("wordllama", StaticModel(own._model.embedding, tokenizer, normalize=True))
    texts = ["Money back for a trip?", "", "na\u00efve \u4f60\u597d \U0001f99c", "word " * 3000]
    assert np.abs(own.embed(texts) - theirs.embed(texts)).max() < 1e-3
    assert own.digest == theirs.digest  # vectors that were stored are of the same weights


@pytest.mark.skipif(find_spec("wordllama") is None, reason="needs the weights of wordllama")
def test_the_weights_of_the_extra_are_read_without_model2vec() -> None:
    code = (
        "import sys; from cacheblend_cli.corpus.embedding import find_embedder; find_embedder().embed(['trip']); "
        "print({'model2vec', 'joblib', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def sentence_model(folder: Path, pooling: str = "pooling_mode_mean_tokens", **modules: str) -> Path:
    """A random encoder as sentence-transformers saves one. modules: classes over those there are."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "money", "back", "trip", "food", "query", ":"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(words), max_position_embeddings=12, **shape)).save_pretrained(folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize", **modules}
    told = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(told))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16, pooling: True}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "query: "}}))
    return folder


def hidden_of(folder: Path, text: str) -> np.ndarray:
    """[num_tokens, 16] of one text, by transformers itself."""
    from transformers import AutoModel, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    with torch.inference_mode():
        return AutoModel.from_pretrained(folder)(**tokens).last_hidden_state[0].numpy()


def test_a_directory_of_sentence_transformers_is_read(tmp_path: Path, store: ChunkStore) -> None:
    texts = ["money back", "trip money food back trip", "food"]
    ways = {
        "pooling_mode_mean_tokens": lambda h: h.mean(0),
        "pooling_mode_cls_token": lambda h: h[0],
        "pooling_mode_max_tokens": lambda h: h.max(0),
        "pooling_mode_lasttoken": lambda h: h[-1],
    }
    digests = set()
    for name, pool in ways.items():
        folder = sentence_model(tmp_path / name, name)
        embedder = find_embedder(str(folder))
        assert embedder is not None
        digests.add(embedder.digest)
        theirs = np.stack([pool(hidden_of(folder, text)) for text in texts])
        theirs /= np.linalg.norm(theirs, axis=-1, keepdims=True)
        assert np.abs(embedder.embed(texts) - theirs).max() < 1e-5
        asked = pool(hidden_of(folder, "query: food"))
        assert np.abs(embedder.embed(["food"], question=True)[0] - asked / np.linalg.norm(asked)).max() < 1e-5
    assert len(digests) == len(ways)
    assert embedder is not None
    assert embedder.embed(["money " * 99]).shape == (1, 16)  # longer than its context
    assert len(search(store, "food", Lookup(9, by="meaning", embedder=embedder)).hits) > 0


def test_unsupported_sentence_transformers_are_named(tmp_path: Path) -> None:
    other = sentence_model(tmp_path / "other", **{"2_Normalize": "Dense"})
    with pytest.raises(NotFoundError, match="Dense"):
        find_embedder(str(other))
    with pytest.raises(NotFoundError, match="weightedmean"):
        find_embedder(str(sentence_model(tmp_path / "pool", "pooling_mode_weightedmean_tokens")))
    whole = sentence_model(tmp_path / "whole")
    (whole / "model.safetensors").rename(whole / "pytorch_model.bin")
    with pytest.raises(NotFoundError, match="safetensors"):
        find_embedder(str(whole))


def test_of_a_long_query_the_beginning_is_read(store: ChunkStore) -> None:
    read = list[int]()

    class Measured(ByHand):
        def encode(self, texts: Sequence[str], max_length: int) -> np.ndarray:
            read.append(max(map(len, texts)))
            return super().encode(texts, max_length)

    how = Lookup(9, by="both", embedder=Embedder("measured", Measured()))
    search(store, "norway", how)  # embeds the chunks
    read.clear()
    assert found(store, "norway " + "zebra " * 1_000_000, how) == found(store, "norway", how)
    assert max(read) <= 1 << 15
