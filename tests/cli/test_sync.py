"""sync and watch: the store follows the documents, with what it remembers of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cacheblend_store import ChunkStore

from cacheblend_cli.cli.sync import _Wanted

Cli = Callable[..., Any]


def sources(cli: Cli) -> set[str]:
    return {r["source"] for r in cli("chunks", "ls", "--json").records}


def test_sync_takes_the_paths_and_the_settings_that_are_remembered(cli: Cli, docs: Path, tmp_path: Path) -> None:
    assert cli("sync").code == 3, "there is no store yet"
    cli("precompute", "docs", "--chunk-tokens", "40", "--exclude", "draft*")
    (docs / "new.md").write_text("# New\n\n" + "who works in Bergen. " * 20)
    (docs / "draft.md").write_text("not taken\n")
    (docs / "beta.md").unlink()
    os.chdir("/")
    [report] = cli("sync", "--json").records
    assert (report["documents"], report["gone"], report["replaced"]) == (2, 1, 0)
    assert report["new"] >= 2
    os.chdir(tmp_path)
    assert sources(cli) == {"docs/alpha.md", "docs/new.md"}
    assert all(r["tokens"] <= 40 for r in cli("chunks", "ls", "--json").records)
    again = cli("sync")
    assert again.code == 0
    assert "2 documents: nothing new" in again.err
    assert cli("sync", "--salt", "other").code == 3


def test_sync_names_a_path_that_is_no_more(cli: Cli, docs: Path) -> None:
    cli("precompute", "docs")
    docs.rename(docs.parent / "moved")
    result = cli("sync")
    assert result.code == 3
    assert f"{docs} is no more" in result.err


def test_changes_of_hidden_files_and_of_the_store_do_not_matter(tmp_path: Path) -> None:
    wanted = _Wanted([str(tmp_path)], tmp_path / "store")
    for name, expected in {
        "a.md": True, "sub/a.md": True, ".gitignore": True, ".git/index": False, "sub/.a.md.swp": False, "store/data.mdb": False,
        "store": False, "stored/a.md": True,
    }.items():  # fmt: skip
        assert wanted(None, str(tmp_path / name)) == expected, name


@pytest.fixture
def watching(docs: Path, model: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    arguments = ["watch", "docs", "--model", str(model), "--store", "store"]
    entry = [sys.executable, "-c", "from cacheblend_cli.cli.main import main; main()", *arguments]
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in a shell's background have it ignored
    process = subprocess.Popen(entry, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=default)
    yield process
    process.kill()
    process.communicate()


def test_watch_stores_what_changes_and_ends_with_ctrl_c(
    cli: Cli, docs: Path, tmp_path: Path, watching: subprocess.Popen[str]
) -> None:
    assert watching.stderr is not None
    lines = iter(watching.stderr.readline, "")
    assert any("2 new, 0 unchanged; watching docs" in line for line in lines)
    (docs / "alpha.md").write_text("# alpha\n\nsomebody else in Oslo\n")
    assert any("1 replaced" in line for line in lines)
    with ChunkStore.open(tmp_path / "store", mode="write", lock_timeout=120):
        pass  # between two runs nobody holds it
    (docs / "beta.md").unlink()
    assert any("is gone" in line for line in lines)
    assert any("1 removed" in line for line in lines)
    assert sources(cli) == {"docs/alpha.md"}
    watching.send_signal(signal.SIGINT)
    assert watching.wait(timeout=120) == 130


def test_what_fails_is_tried_again(cli: Cli) -> None:
    from cacheblend_store import StoreLocked

    from cacheblend_cli.api import PrecomputeReport
    from cacheblend_cli.cli.output import Output
    from cacheblend_cli.cli.sync import follow

    runs: list[str] = []

    def sync() -> PrecomputeReport:
        runs.append("run")
        if len(runs) in (2, 3):
            raise StoreLocked("the store is busy", "wait")
        return PrecomputeReport(documents=1, new=1)

    follow([set(), {"a change"}, set(), set(), set()], sync, Output(quiet=True), "docs")
    assert len(runs) == 4, "the start, the change, two tries more"
    runs.clear()
    follow([set(), set()], lambda: (runs.append("run"), PrecomputeReport())[1], Output(quiet=True), "docs")
    assert len(runs) == 2, "what changed before the watching began is found"


def test_sync_finds_a_folder_whose_name_is_no_utf8(cli: Cli, docs: Path) -> None:
    strange = docs.rename(docs.parent / "docs\udcff")
    assert cli("precompute", str(strange)).code == 0
    (strange / "gamma.md").write_text("gamma and more\n")
    result = cli("sync", "--json")
    assert "no more" not in result.err
    assert result.records[0]["new"] == 1
