"""The Python library: the example of the documents, and what it promises beside it."""

from __future__ import annotations

import asyncio
import json
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cacheblend_store import StoreError
from checkpoints import write_checkpoint

from cacheblend_cli import ChunkStore, Engine
from cacheblend_cli.engine.events import Limits
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.named import smollm2_file

ROOT = Path(__file__).parents[1]
PAGES = [("a", "the lead of billing is Mara and she works in Bergen"), ("b", "Jonas keeps a parrot at home")]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("library") / "tiny"
    write_checkpoint(path, "llama-gqa", max_position_embeddings=1024)
    with Engine.load(str(path), threads=1, max_tokens=5, chunk_tokens=40, search="words") as loaded:
        yield loaded


@pytest.fixture
def store(tmp_path: Path, engine: Engine) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store", mode="write") as opened:
        engine.use(opened)
        yield opened
        engine.close()


def test_the_example_of_the_documents_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """By SmolLM2 the answers are those in the comments; without it the bundled model runs the same lines."""
    [code, *_] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    assert code.count('Engine.load("smollm2"') == 1
    if smollm2_file() is None:
        code = code.replace('"smollm2"', '"handbook"')
    script = tmp_path / "example.py"
    script.write_text(code)
    monkeypatch.chdir(tmp_path)
    import runpy

    runpy.run_path(str(script))
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith((" exact", " blended")) for line in lines) >= 1
    assert any(line.isdigit() and int(line) > 0 for line in lines)
    shown = re.findall(r"\.text\)  # (.*)", code)
    assert len(shown) == 2
    if smollm2_file() is not None:
        assert set(shown) <= set(lines)
        assert "front desk" in lines[-1]


def test_the_example_with_transformers_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "tiny", "llama-gqa", max_position_embeddings=1024)
    text = (ROOT / "docs" / "python.md").read_text()
    [code] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "prefill" in block]
    assert code.count("path/to/model") == 1
    (tmp_path / "example.py").write_text(code.replace("path/to/model", str(tmp_path / "tiny")))
    import runpy

    runpy.run_path(str(tmp_path / "example.py"))
    first, second = (int(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if line[-1:].isdigit())
    assert first == 0 < second


def test_what_is_added_is_found_and_replaced(engine: Engine, store: ChunkStore) -> None:
    added = engine.add(store, texts=PAGES)
    assert [a.id for a in added] == ["a", "b"]
    answer = engine.ask("who?", chunks=[c for a in added for c in a.chunks])
    assert [c.status for c in answer.chunks] == ["exact", "blended"]
    assert [c.id for c in engine.ask("parrot", search=3).chunks] == list(added[1].chunks)
    engine.add(store, texts=[("b", "Jonas keeps a cat")])
    assert not store.has_chunk(bytes.fromhex(added[1].chunks[0]))


def test_together_and_one_by_one_say_the_same(engine: Engine, store: ChunkStore) -> None:
    engine.add(store, texts=PAGES)
    asked = [engine.request(f"who is it {i}?", documents=[PAGES[i % 2][1]], max_tokens=3 + i) for i in range(4)]
    alone = [engine.ask(one).text for one in asked]
    assert [a.text for a in engine.ask_many(asked)] == alone
    assert ["".join(engine.stream(one)) for one in asked] == alone

    async def both() -> tuple[list[str], str]:
        answers = await asyncio.gather(*(engine.ask_async(one) for one in asked))
        return [a.text for a in answers], "".join([piece async for piece in engine.stream_async(asked[0])])

    assert asyncio.run(both()) == (alone, alone[0])


def test_settings_and_errors(engine: Engine, store: ChunkStore) -> None:
    assert len(engine.ask("who?", max_tokens=2).generated_ids) <= 2
    for wrong in ({"max_token": 3}, {"selector": "magic"}, {"documents": [" "]}, {"chunk_tokens": 9}):
        with pytest.raises(UsageError):
            engine.ask("who?", **wrong)
    with pytest.raises(UsageError, match="inputs_embeds"):
        engine.ask("who?", inputs_embeds=[[0.0]])
    with pytest.raises(UsageError):
        Engine.load("handbook", colour="red")


def test_documents_without_a_store(engine: Engine) -> None:
    engine.use(None)
    texts = [text for _, text in PAGES]
    first, again = (engine.ask("who?", documents=texts) for _ in range(2))
    assert (first.cached_tokens, again.cached_tokens) == (0, sum(c.tokens for c in first.chunks))
    assert engine._store is not None
    folder = engine._store.path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    engine.close()
    assert not folder.exists()
    assert engine.ask("who?", documents=texts).cached_tokens == 0
    with pytest.raises(StoreError):
        engine.ask("who?", chunks=["00"])


def test_the_models_own_sampling_is_followed_where_it_is_asked_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tiny", "llama-gqa")
    file = tmp_path / "tiny" / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "repetition_penalty": 5.0}))
    with Engine.load(str(tmp_path / "tiny"), threads=1, max_tokens=12) as engine:
        own, said = engine.ask("who?", model_sampling=True), engine.ask("who?", repetition_penalty=5.0)
        assert own.generated_ids == said.generated_ids != engine.ask("who?").generated_ids
        named = engine.ask("who?", model_sampling=True, repetition_penalty=1.0)
        assert named.generated_ids == engine.ask("who?").generated_ids


def test_leaving_a_stream_ends_the_answer(engine: Engine, store: ChunkStore) -> None:
    pieces = engine.stream("who?", max_tokens=900, temperature=3.0, seed=1)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert engine.ask("who?", max_tokens=2).generated_ids


def test_the_names_cost_nothing_until_they_are_used() -> None:
    code = "import sys, cacheblend_cli; print('torch' in sys.modules, 'Engine' in dir(cacheblend_cli) or cacheblend_cli.__all__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False")


def test_more_questions_than_the_queue_holds(engine: Engine, store: ChunkStore) -> None:
    with Engine(engine.runtime, engine._resolved, Limits(max_waiting=3)) as small:
        answers = small.ask_many([f"who {i}?" for i in range(20)], max_tokens=2)
    assert [a.text for a in answers] == [engine.ask(f"who {i}?", max_tokens=2).text for i in range(20)]


def test_threads_that_ask_first_share_one_service(engine: Engine, store: ChunkStore) -> None:
    engine.close()
    with ThreadPoolExecutor(6) as pool:
        texts = set(pool.map(lambda _: engine.ask("who?", max_tokens=2).text, range(12)))
    assert len(texts) == 1
    assert [t.name for t in threading.enumerate()].count("cacheblend-engine") == 1


@pytest.mark.parametrize("late", [False, True], ids=["running", "queued"])
def test_a_cancelled_task_cancels_its_answer(
    engine: Engine, store: ChunkStore, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """late: the task is cancelled before it knows that its request was queued."""
    service = engine._started()

    async def until_cancelled(submit: Callable[[], object]) -> None:
        submit()
        await asyncio.Event().wait()

    async def first_piece() -> None:
        async for _ in engine.stream_async("who?", max_tokens=900):
            pass

    async def leave() -> None:
        for number, coroutine in enumerate((engine.ask_async("who?", max_tokens=900), first_piece())):
            task = asyncio.create_task(coroutine)
            while not service.stats().running:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while service.stats().cancelled == number:
                await asyncio.sleep(0)

    if late:
        monkeypatch.setattr(asyncio, "to_thread", until_cancelled)
    asyncio.run(leave())
    assert engine.ask("who?", max_tokens=2).generated_ids  # behind the cancelled ones
    assert service.stats().cancelled == 2
