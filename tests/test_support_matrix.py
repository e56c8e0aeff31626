"""The table of docs/index.md: what it says of a kind of model is tried, and every other "no" is refused by the code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hub_hybrids
import pytest
import torch
from adapters import write_adapter
from cacheblend_store import ChunkStore
from cacheblend_store.tier import SharedTier, open_tier
from checkpoints import write_checkpoint
from gguf_files import write_gguf
from hub_models import HubModel
from parity import QUESTION, write_documents
from transformers import OlmoConfig

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.features.speculation import Speculation
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.engine.ranks.driver import RankedWorker, config_of_ranks
from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.evaluation.profile import check_blends
from cacheblend_cli.model.description import Precision
from cacheblend_cli.model.gguf_files.config import config_of
from cacheblend_cli.model.loading import load_model
from cacheblend_cli.model.rank_shard import check_divisible
from cacheblend_cli.types import AskOptions, AskRequest, BlendParams, SamplingParams

PAGE = Path(__file__).parents[1] / "docs" / "index.md"
SAMPLING = SamplingParams(max_tokens=2, ignore_eos=True)
AUTO = AskOptions(auto=True)


def matrix() -> dict[tuple[str, str], str]:
    """Return the cells of the table by feature and column."""
    lines = PAGE.read_text(encoding="utf-8").partition("## What works with what")[2].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    (_, *columns), _, *features = rows
    return {(row[0], column): cell for row in features for column, cell in zip(columns, row[1:], strict=True)}


CELLS = matrix()


@dataclass(frozen=True)
class Kind:
    """A kind of model, by its column of the table, with a store of two documents. checkpoint: in safetensors."""

    name: str
    folder: Path
    checkpoint: Path
    model: Path
    store: ChunkStore
    engine: Engine

    def load(self, **settings: Any) -> Engine:
        return Engine.load(EngineConfig(model=str(self.model), dtype="float32", block_size=16, **settings))

    def question(self, store: ChunkStore | None = None, **changes: Any) -> AskRequest:
        store = store or self.store
        options = PrecomputeOptions(chunk_tokens=40, context="sink")
        self.engine.precompute(store, [str(self.folder / "documents")], options, lambda event: None)
        keys = [m.key for m in sorted(store.chunks(), key=lambda m: (m.source, m.index))]
        return replace(AskRequest(QUESTION, keys[:4], BlendParams(), SAMPLING), **changes)

    def answers(self, engine: Engine | None = None, **changes: Any) -> bool:
        answer = (engine or self.engine).run_alone(self.store, self.question(**changes))
        return len(answer.generated_ids) == SAMPLING.max_tokens

    def answers_from_tier(self) -> bool:
        with self.in_tier() as (store, question):
            answer = self.engine.run_alone(store, question)
        return answer.tier is not None and answer.tier.taken > 0

    @contextmanager
    def in_tier(self) -> Iterator[tuple[ChunkStore, AskRequest]]:
        """Yield another store of the documents, whose KV is in a tier alone, and a question over them."""
        with ChunkStore.open(self.folder / "shared", mode="write") as store:
            tier = SharedTier(open_tier(f"file://{self.folder}/tier", None), 60.0, lambda text: None)
            store.share(tier)
            question = self.question(store)
            assert tier.flush(60.0) == 0
            store.evict_chunks([m.key for m in store.chunks(prefixes=True)])
            yield store, question

    def takes_an_adapter(self) -> bool:
        write_adapter(self.folder / "lora", self.checkpoint, ["q_proj", "o_proj"])
        return self.answers(self.load(lora=str(self.folder / "lora")))

    def is_read_from_gguf(self) -> bool:
        """A CPU's model is, as the column of GGUF files shows; the others' architectures are refused by name."""
        names = {"generic path": "olmo", "hybrid": "qwen35"}
        if self.name in names:
            config_of({"general.architecture": names[self.name]}, {}, {}, "F16")
        return True

    def is_handed_over(self) -> bool:
        with self.load() as engine:
            return bool(engine.prefill(QUESTION, documents=["Mara works in Bergen."]).token_ids)


FEATURES: dict[str, Callable[[Kind], object]] = {
    "`precompute`, `ask`, `serve`": Kind.answers,
    "blending: `--ratio`, `--selector`": lambda kind: kind.answers(blend=BlendParams(ratio=0.5, selector="hkvd")),
    "`--ratio auto`": lambda kind: kind.answers(options=AUTO),
    "`--tier` for questions": Kind.answers_from_tier,
    "`--tensor-parallel`": lambda kind: check_divisible(kind.engine.model.spec, 2) is None,
    "GGUF files": Kind.is_read_from_gguf,
    "`--weight-dtype int8` and `int4`": lambda kind: kind.answers(kind.load(weight_dtype="int8")),
    "`--lora`": Kind.takes_an_adapter,
    "`--kv-pool-dtype float8_e4m3`": lambda kind: kind.answers(kind.load(kv_pool_dtype="float8_e4m3")),
    "several tokens a step (`speculate`)": lambda kind: Speculation.of(kind.engine.runtime) is not None,
    "other decoders: `serve --decoder`, `Engine.prefill`": Kind.is_handed_over,
    "`models check` for a ratio, `eval`, `bench`": lambda kind: check_blends(kind.engine) is None,
}
KINDS = ("CPU", "generic path", "hybrid", "GGUF file")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    folder = tmp_path_factory.mktemp("kind")
    model = checkpoint = folder / "model"
    if request.param == "generic path":
        HubModel("olmo", OlmoConfig).write(checkpoint)
    elif request.param == "hybrid":
        hub_hybrids.QWEN.write(checkpoint)
    else:
        write_checkpoint(checkpoint, "llama-gqa")
    if request.param == "GGUF file":
        model = folder / "model.gguf"
        write_gguf(checkpoint, model, "llama", "Q8_0")
    write_documents(folder / "documents")
    with ChunkStore.open(folder / "store", mode="write") as store:
        engine = Engine.load(EngineConfig(model=str(model), dtype="float32", block_size=16))
        yield Kind(request.param, folder, checkpoint, model, store, engine)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_kind_of_model_has_what_the_table_says(kind: Kind, feature: str) -> None:
    try:
        works = FEATURES[feature](kind)
    except CacheBlendError:
        works = False
    cell = CELLS[feature, kind.name]
    assert cell == ("yes" if works else "no") or not cell  # empty where the feature is the column itself


def quantised_on_a_gpu(kind: Kind) -> None:
    """On Apple's, since torch names it without a driver: the rule is that a device is a CPU."""
    load_model(kind.model, "m", torch.device("mps"), Precision("float32", "int8"), "torch")


@contextmanager
def on_two_ranks(kind: Kind) -> Iterator[None]:
    """Let the engine take its model for a part of one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind.engine.runtime.decoder.part, "is_whole", False)
        yield


def auto_ratio_on_ranks(kind: Kind) -> None:
    request = kind.engine.resolve(kind.store, kind.question(options=AUTO))
    with on_two_ranks(kind):
        kind.engine.plan_of(request)


def tier_on_ranks(kind: Kind) -> None:
    with kind.in_tier() as (store, question), on_two_ranks(kind):
        kind.engine.resolve(store, question)


def quantised_on_ranks(kind: Kind) -> None:
    config_of_ranks(EngineConfig(model=str(kind.model), weight_dtype="int8"), 2, kind.model, torch.device("cpu"))


def measured_on_ranks(kind: Kind) -> None:
    request = kind.engine.resolve(kind.store, kind.question())
    with on_two_ranks(kind):
        prefill(kind.engine.runtime, request)


REFUSED: dict[tuple[str, str], Callable[[Kind], object]] = {
    ("`--weight-dtype int8` and `int4`", "NVIDIA GPU"): quantised_on_a_gpu,
    ("`--weight-dtype int8` and `int4`", "several ranks"): quantised_on_ranks,
    ("`--ratio auto`", "several ranks"): auto_ratio_on_ranks,
    ("`--tier` for questions", "several ranks"): tier_on_ranks,
    ("`--tensor-parallel`", "shared tier"): tier_on_ranks,
    ("other decoders: `serve --decoder`, `Engine.prefill`", "several ranks"): lambda kind: RankedWorker.export_kv(
        None, None, 0
    ),
    ("`models check` for a ratio, `eval`, `bench`", "several ranks"): measured_on_ranks,
}


@pytest.mark.parametrize("kind", ["CPU"], indirect=True)
@pytest.mark.parametrize("cell", REFUSED, ids=" / ".join)
def test_gpus_and_ranks_are_refused_what_the_table_says(kind: Kind, cell: tuple[str, str]) -> None:
    with pytest.raises(CacheBlendError) as refused:
        REFUSED[cell](kind)
    reason = "--weight-dtype" if cell[1] == "NVIDIA GPU" else "--tensor-parallel"
    assert reason in f"{refused.value.message} {refused.value.hint}"


def test_every_cell_of_the_table_is_tried_or_not_refused() -> None:
    others = {cell for cell, text in CELLS.items() if text == "no" and cell[1] not in KINDS}
    assert others == set(REFUSED)
    assert {feature for feature, _ in CELLS} == set(FEATURES)
    assert set(CELLS.values()) == {"yes", "no", "untried", ""}
