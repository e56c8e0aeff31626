"""The real `cacheblend precompute`, killed and with a full disk: what it reported is there, and the next run goes
on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import pytest
from cacheblend_store import ChunkStore, verify
from checkpoints import WORDS, write_checkpoint
from disk_shim import Fault, build, environment
from ledger import Ledger

from cacheblend_cli.cli.main import run
from cacheblend_cli.collect import commits, storing
from cacheblend_cli.collect.storing import PlanStorage

CLI = "from cacheblend_cli.cli.main import main; main()"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model and enough documents to be killed among them."""
    folder, rng = tmp_path_factory.mktemp("corpus"), random.Random(0)
    write_checkpoint(folder / "model", "qwen2", max_position_embeddings=1024)
    for n in range(8):
        (folder / "docs" / str(n % 4)).mkdir(parents=True, exist_ok=True)
        text = "\n\n".join(" ".join(rng.choices(WORDS, k=30)) for _ in range(8))
        (folder / "docs" / str(n % 4) / f"{n:02}.md").write_text(f"# Document {n}\n\n{text}\n")
    return folder


EAGER = "from cacheblend_cli.collect import commits; commits.GROUP_SECONDS = 0.0; "
"""A commit for every chunk: so small a corpus would be one group."""


def _arguments(corpus: Path, store: Path, part: str = "") -> list[str]:
    """part: the documents of one of four writers, all by default."""
    given = {"--model": corpus / "model", "--store": store, "--chunk-tokens": 32, "--threads": 1}
    return ["precompute", str(corpus / "docs" / part), *map(str, chain(*given.items())), "--json"]


def _command(corpus: Path, store: Path, part: str = "") -> list[str]:
    return [sys.executable, "-c", EAGER + CLI, *_arguments(corpus, store, part)]


def _forked(arguments: list[str]) -> tuple[int, TextIO]:
    """Process id and stdout of the command in a fork of this process, which has imported torch. Its stdout has an empty
    line for each commit of texts."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(write_end, 1)
            os.closerange(read_end, write_end + 1)
            sys.stdout = os.fdopen(1, "w")
            commits.GROUP_SECONDS = 0.0
            storing._BATCH_TOKENS = 0  # a commit of texts for every document
            put_texts = PlanStorage._put_texts

            def told(*given: Any) -> None:
                put_texts(*given)
                print(flush=True)

            PlanStorage._put_texts = told  # type: ignore[method-assign]
            code = run(arguments)
        finally:
            os._exit(code)
    os.close(write_end)
    return pid, os.fdopen(read_end)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _stored(path: Path) -> set[str]:
    """Ids of the chunks with KV in the store, every blob of which has been read and verified."""
    with ChunkStore.open(path) as store:
        assert verify(store).ok
        chunks = list(store.chunks())
        assert {chunk.key for d in store.documents() for chunk in d.chunks} == {m.key for m in chunks}
        return {m.id for m in chunks if m.has_kv}


def _ids(lines: Iterable[str]) -> set[str]:
    return {json.loads(line)["id"] for line in lines if line.strip()}


@pytest.mark.parametrize("num_kills", [1, pytest.param(40, marks=pytest.mark.torture)])
def test_precompute_killed_keeps_what_it_reported(tmp_path: Path, corpus: Path, num_kills: int, ledger: Ledger) -> None:
    rng, store, reported = random.Random(num_kills), tmp_path / "store", set[str]()
    kills = 0
    while kills < num_kills:
        pid, stdout = _forked(_arguments(corpus, store))
        for _ in range(rng.randrange(1, 16)):
            line = stdout.readline()
            if not line:  # all is done: from the beginning
                break
            reported |= _ids([line])
        else:
            os.kill(pid, signal.SIGKILL)
            kills += 1
            reported |= _ids(stdout.read().rpartition("\n")[0].splitlines())  # a last line may be cut
        _, status = os.waitpid(pid, 0)
        stdout.close()
        assert reported <= _stored(store)
        if status == 0:
            store, reported = tmp_path / f"store-{kills}", set()
    if reported:
        pid, stdout = _forked(_arguments(corpus, store))
        with stdout:
            records = [json.loads(line) for line in stdout if line.strip()]
        assert os.waitpid(pid, 0)[1] == 0
        assert {r["id"] for r in records} == _stored(store) >= reported
        assert {r["id"] for r in records if r["status"] == "unchanged"} >= reported  # none is computed twice
    ledger.add("SIGKILL of cacheblend precompute", kills=kills, lost=0, torn=0)


def _reported(file: Path) -> set[str]:
    """Ids in what a command printed before it was killed; its last line may be cut."""
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return {json.loads(line)["id"] for line in whole.splitlines()}


@pytest.mark.parametrize("num_kills", [pytest.param(40, marks=pytest.mark.torture)])
def test_four_precomputes_killed_keep_what_they_reported(
    tmp_path: Path, corpus: Path, num_kills: int, ledger: Ledger
) -> None:
    rng, round_, kills, everything = random.Random(num_kills), 0, 0, set[str]()
    store, reported = tmp_path / "store-0", set[str]()
    while kills < num_kills:
        outs = [tmp_path / f"{round_}-{part}.jsonl" for part in range(4)]
        writers = []
        for part, out in enumerate(outs):
            with out.open("w") as stream:
                command = _command(corpus, store, str(part))
                writers.append(subprocess.Popen(command, stdout=stream, env=_environment()))
        wanted, watched = rng.randrange(1, 30), rng.randrange(4)
        while len(_reported(outs[watched])) < wanted and writers[watched].poll() is None:
            time.sleep(0.005)
        rng.shuffle(writers)
        for writer in writers:
            writer.kill()
            time.sleep(rng.uniform(0, 0.02))
        kills += sum(writer.wait() == -9 for writer in writers)
        assert all(writer.returncode in (0, -9) for writer in writers)
        new = set[str]().union(*map(_reported, outs))
        reported, everything = reported | new, everything | new
        assert reported <= _stored(store)
        round_ += 1
        if any(writer.returncode == 0 for writer in writers):
            store, reported = tmp_path / f"store-{round_}", set()
    assert everything
    ledger.add("SIGKILL of four cacheblend precompute at once", kills=kills, lost=0, torn=0)


def test_precompute_on_a_full_disk_exits_with_4_and_keeps_what_it_reported(
    tmp_path: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shim, store = build(tmp_path_factory.mktemp("shim")), tmp_path / "store"
    done = subprocess.run(
        _command(corpus, store), capture_output=True, text=True,
        env=environment(shim, tmp_path, fault=f"120:{int(Fault.FAIL_SPACE)}:1"),
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert str(store) in done.stderr
    assert "Traceback" not in done.stderr
    reported = {json.loads(line)["id"] for line in done.stdout.splitlines()}
    assert reported
    assert reported <= _stored(store)
