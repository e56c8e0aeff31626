"""Several engines of one process over one store, each in its thread: they answer as one alone does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cacheblend_store import ChunkStore
from checkpoints import WORDS, write_checkpoint

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

QUESTIONS = ("where does Mara work?", "who?", "what is it about", "where")


def test_engines_ask_side_by_side(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "llama-gqa", max_position_embeddings=1024)
    (tmp_path / "docs").mkdir()
    for page in range(4):
        words = [WORDS[(5 * page + i) % len(WORDS)] for i in range(60)]
        (tmp_path / "docs" / f"{page}.md").write_text(" ".join(words) + "\n")
    config = EngineConfig(model=str(tmp_path / "model"), threads=1)
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        first = Engine.load(config)
        options = PrecomputeOptions(chunk_tokens=24, context="sink")
        first.precompute(store, [str(tmp_path / "docs")], options, lambda event: None)
        keys = [m.key for m in store.chunks()]

        def answers(engine: Engine) -> list[list[int]]:
            sampling = SamplingParams(max_tokens=6, ignore_eos=True)
            asked = [AskRequest(text, keys, BlendParams(ratio=0.3), sampling) for text in QUESTIONS]
            return [engine.run_alone(store, question).generated_ids for question in asked]

        alone = answers(first)
        with ThreadPoolExecutor(3) as pool:
            engines = [first, *pool.map(lambda _: Engine.load(config), range(2))]
            for _ in range(2):
                assert list(pool.map(answers, engines)) == [alone] * 3
