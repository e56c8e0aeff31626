"""Chunks collected in several contexts: each is exact where it should be, and they live side by side in a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from cacheblend_store import ChunkManifest, ChunkStore, verify
from checkpoints import WORDS, write_checkpoint
from computed_again import differing_chunks
from stored_texts import forget

from cacheblend_cli.collect.events import PrecomputeReport
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import Prefilled, prefill
from cacheblend_cli.engine.request.chunks import ChunkRecords
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.engine.request.retrieval import exact_first, exact_where_stored
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams, SearchParams

QUESTION = "where does Mara work?"
CONTEXTS = ("sink", "document", "neighbours")


class Corpus:
    """Two pages of three paragraphs, an engine over a random model, and an empty store."""

    def __init__(self, root: Path, family: str = "llama-gqa") -> None:
        write_checkpoint(root / "model", family)
        self.engine = Engine.load(EngineConfig(model=str(root / "model"), block_size=16))
        self.docs = root / "docs"
        self.docs.mkdir()
        for d in range(2):
            self.write(d, [" ".join(WORDS[(d + p) % 7 : (d + p) % 7 + 9]) + f" {d}{p}." for p in range(3)])
        self.store = ChunkStore.open(root / "store", mode="write")

    def write(self, number: int, paragraphs: Sequence[str]) -> None:
        (self.docs / f"{number}.md").write_text("\n\n".join(paragraphs) + "\n")

    def precompute(self, context: str, *names: str, **options: int) -> PrecomputeReport:
        paths = [str(self.docs / name) for name in names] or [str(self.docs)]
        wanted = PrecomputeOptions(chunk_tokens=40, context=context, **options)  # type: ignore[arg-type]
        return self.engine.precompute(self.store, paths, wanted, lambda event: None)

    def chunks(self, context: str, page: int = 0) -> list[ChunkManifest]:
        """Of one page in one context, in order."""
        record = self.store.get_document(self.engine.runtime.collection().id, f"{self.docs}/{page}.md", context)
        found = [self.store.get_chunk(place.key) for place in record.chunks] if record else []
        return [m for m in found if m is not None]

    def prefill(self, keys: Sequence[bytes], blend: BlendParams) -> Prefilled:
        request = resolve(self.engine.runtime, self.store, AskRequest(QUESTION, keys, blend, SamplingParams()))
        return prefill(self.engine.runtime, request)

    def far_from_full(self, keys: Sequence[bytes]) -> float:
        """Largest difference of a logit, nothing repaired, to a full prefill."""
        full, reused = (self.prefill(keys, BlendParams(mode=mode)).result.logits for mode in ("full", "reuse"))
        return float((full - reused).abs().max())


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus(tmp_path)


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window", "qwen3", "llama-yarn"])
def test_neighbouring_chunks_of_a_page_in_order_need_no_repair(tmp_path: Path, family: str) -> None:
    corpus = Corpus(tmp_path, family)
    corpus.precompute("document")
    keys = [m.key for m in corpus.chunks("document")]
    done = corpus.prefill(keys, BlendParams(ratio=0.0))
    assert [s.status for s in done.plan.chunks] == ["exact"] * 3
    assert done.result.fresh_token_layers == 0
    assert corpus.far_from_full(keys) <= 1e-4
    other = [m.key for m in corpus.chunks("document", 1)]
    assert [s.status for s in corpus.prefill([*keys[:2], *other], BlendParams()).plan.chunks] == [
        "exact", "exact", "blended", "blended", "blended",
    ]  # fmt: skip
    assert [s.status for s in corpus.prefill(keys[1:], BlendParams()).plan.chunks] == ["blended"] * 2
    assert corpus.far_from_full(keys[1:]) > 1e-3


def test_a_chunk_behind_its_neighbour_needs_no_repair(corpus: Corpus) -> None:
    corpus.precompute("sink")
    corpus.precompute("neighbours", neighbours=1)
    own = next(m for m in corpus.chunks("neighbours") if m.left_context_ids)
    everything = [*corpus.chunks("sink"), *corpus.chunks("sink", 1)]
    neighbour = next(m for m in everything if m.token_ids == own.left_context_ids)
    done = corpus.prefill([neighbour.key, own.key], BlendParams(ratio=0.0))
    assert [s.status for s in done.plan.chunks] == ["exact", "exact"]
    assert corpus.far_from_full([neighbour.key, own.key]) <= 1e-4
    assert corpus.far_from_full([own.key]) > 1e-3  # its KV knows what the prompt does not say


def test_contexts_live_side_by_side_and_the_same_run_again_changes_nothing(corpus: Corpus) -> None:
    for context in CONTEXTS:
        corpus.precompute(context, neighbours=2)
    stored = {context: [m.key for p in (0, 1) for m in corpus.chunks(context, p)] for context in CONTEXTS}
    assert [len(keys) for keys in stored.values()] == [6, 6, 6]
    assert not {*stored["sink"]} & {*stored["neighbours"]}
    first_of_page = {stored["sink"][0], stored["sink"][3]}  # nothing precedes them: the same KV in both contexts
    assert {*stored["sink"]} & {*stored["document"]} == first_of_page
    before = {m.key: m for m in corpus.store.chunks(prefixes=True)}
    for context in CONTEXTS:
        report = corpus.precompute(context, neighbours=2)
        assert (report.unchanged, report.new, report.replaced, report.removed) == (6, 0, 0, 0)
    assert {m.key: m for m in corpus.store.chunks(prefixes=True)} == before
    assert verify(corpus.store).ok
    assert not differing_chunks(corpus.engine.collection(corpus.store), corpus.store)


def test_neighbours_do_not_depend_on_the_order_of_the_run(corpus: Corpus) -> None:
    corpus.precompute("neighbours", "0.md", "1.md", neighbours=2)
    report = corpus.precompute("neighbours", "1.md", "0.md", neighbours=2)
    assert (report.unchanged, report.computed_tokens) == (6, 0)


def test_neighbours_are_found_in_the_store_too(corpus: Corpus) -> None:
    """Page by page ends as all at once does, whatever context the other page is stored in."""
    corpus.precompute("neighbours", neighbours=3)
    whole = [m.key for m in corpus.chunks("neighbours", 0)]
    corpus.store.remove_chunks([m.key for m in corpus.store.chunks()])
    forget(corpus.store, corpus.engine.runtime.collection().id, f"{corpus.docs}/0.md", "neighbours")
    forget(corpus.store, corpus.engine.runtime.collection().id, f"{corpus.docs}/1.md", "neighbours")
    corpus.precompute("sink", "1.md")
    corpus.precompute("neighbours", "0.md", neighbours=3)
    assert [m.key for m in corpus.chunks("neighbours", 0)] == whole
    assert corpus.precompute("neighbours", "0.md", neighbours=3).unchanged == 3


def test_new_neighbours_are_new_chunks(corpus: Corpus) -> None:
    corpus.precompute("neighbours", "0.md", neighbours=1)
    before = corpus.chunks("neighbours")
    corpus.write(1, ["nothing in common", before[0].text.strip() + " again"])
    corpus.precompute("sink", "1.md")
    report = corpus.precompute("neighbours", "0.md", neighbours=1)
    assert report.replaced >= 1
    assert report.replaced == report.removed
    assert corpus.chunks("neighbours")[0].left_context_ids != before[0].left_context_ids
    assert corpus.store.get_chunk(before[0].key) is None
    assert verify(corpus.store).ok


def test_a_changed_document_takes_its_outdated_chunks_of_other_contexts_along(corpus: Corpus) -> None:
    for context in CONTEXTS:
        corpus.precompute(context)
    corpus.write(0, ["something else entirely", "and more of it"])
    corpus.precompute("document", "0.md")
    assert "something else" in corpus.chunks("document")[0].text
    assert corpus.chunks("sink") == corpus.chunks("neighbours") == []
    assert len(corpus.chunks("sink", 1)) == 3
    (corpus.docs / "1.md").unlink()
    corpus.precompute("sink")
    assert {m.source for m in corpus.store.chunks()} == {f"{corpus.docs}/0.md"}
    assert verify(corpus.store).ok


def test_the_window_ends_at_the_models_context(tmp_path: Path) -> None:
    """512 positions: what a chunk sees and the chunk fit them, whatever window was asked for."""
    corpus = Corpus(tmp_path)
    corpus.write(0, [" ".join(WORDS) + f" {p}." for p in range(40)])
    for context in ("document", "neighbours"):
        corpus.precompute(context, window=10_000, neighbours=30)
        lengths = [m.collected_len for m in corpus.chunks(context)]
        assert 400 < max(lengths) <= 512
    assert corpus.far_from_full([m.key for m in corpus.chunks("document")[:8]]) <= 1e-4


def test_two_documents_begin_a_prompt_that_are_exact_together(corpus: Corpus) -> None:
    """The best hit comes first, unless another page leads it whose text it was collected behind."""
    pages = "beta is where Mara works, xyzzy plugh", "beta gamma delta", "beta gamma alpha"
    for number, text in enumerate(pages):
        corpus.write(number, [f"{text} {number}."])
    ask = AskRequest("where does Mara work in beta?", search=SearchParams(k=3, by="words"))
    corpus.precompute("document")
    own = {m.source[-4]: m.key for m in corpus.store.chunks()}

    def found() -> tuple[list[str], list[str]]:
        """Return the pages in the prompt's order, and their status."""
        request = resolve(corpus.engine.runtime, corpus.store, ask)
        return [c.citation.source[-4] for c in request.chunks], [s.status for s in request.plan.chunks]

    assert found()[0][0] == "0"  # the best hit, and the longest page
    assert found()[1] == ["exact", *["blended"] * (len(found()[0]) - 1)]
    corpus.precompute("neighbours", neighbours=1)
    behind = {m.source[-4]: m for m in corpus.store.chunks() if m.left_context_ids}
    pages_of = {corpus.store.get_chunk(key).token_ids: page for page, key in own.items()}  # type: ignore[union-attr]
    pairs = {(pages_of[m.left_context_ids], page) for page, m in behind.items()}
    order, status = found()
    assert (order[0], order[1]) in pairs - {("0", order[1])}
    assert status[:2] == ["exact", "exact"]
    assert corpus.far_from_full([own[order[0]], behind[order[1]].key]) <= 1e-4
    corpus.store.remove_chunks([m.key for m in behind.values()])
    assert found()[0][0] == "0"


def test_any_hit_may_lead_by_itself(corpus: Corpus) -> None:
    """The longest page begins the prompt, though it is the last of many hits."""
    for number in range(12):
        corpus.write(number, [f"beta gamma {'home ' * (number + 1)}{number}."])
    corpus.precompute("document")
    with ChunkRecords(corpus.store) as stored:
        pages = [[m.key for m in corpus.chunks("document", number)] for number in range(12)]
        found = exact_first(corpus.engine.runtime.collection(), stored, pages)
    assert found == [pages[-1], *pages[:-1]]


def exact_of(corpus: Corpus, keys: Sequence[bytes]) -> list[bytes]:
    with ChunkRecords(corpus.store) as stored:
        return exact_where_stored(corpus.engine.runtime.collection(), stored, keys)


def test_the_exact_variant_is_taken_for_chunks_that_were_searched(corpus: Corpus) -> None:
    corpus.precompute("sink")
    corpus.precompute("document")
    sink, document = ([m.key for m in corpus.chunks(c)] for c in ("sink", "document"))
    other = [m.key for m in corpus.chunks("sink", 1)]
    assert exact_of(corpus, [*sink, *other]) == [
        *document,
        *other,
    ]
    assert exact_of(corpus, [sink[1], sink[0]]) == [
        sink[1],
        sink[0],
    ]
    assert exact_of(corpus, [document[1], document[2]])[1] == document[2]
    logits = [corpus.prefill(keys, BlendParams(mode="reuse")).result.logits for keys in (document, sink)]
    assert not torch.equal(*logits)
    corpus.store.remove_chunks([document[1]])  # what follows a chunk that needs repair is never exact
    assert exact_of(corpus, sink) == [document[0], *sink[1:]]
