"""precompute without PATH and precompute --watch: the store follows the documents with what it remembers of them."""

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

from cacheblend_cli.cli.watch import _Relevant

Cli = Callable[..., Any]


def sources(cli: Cli) -> set[str]:
    return {r["source"] for r in cli("chunks", "ls", "--json").records}


def test_without_path_remembered_folders_are_updated_with_their_settings(cli: Cli, docs: Path, tmp_path: Path) -> None:
    assert cli("precompute").code == 3, "there is no store yet"
    cli("precompute", "docs", "--chunk-tokens", "40", "--exclude", "draft*")
    (docs / "new.md").write_text("# New\n\n" + "who works in Bergen. " * 20)
    (docs / "draft.md").write_text("not taken\n")
    (docs / "beta.md").unlink()
    os.chdir("/")
    records = cli("precompute", "--json").records
    assert {r["status"] for r in records if r["source"].endswith("new.md")} == {"new"}
    assert {r["status"] for r in records if r["source"].endswith("alpha.md")} == {"unchanged"}
    os.chdir(tmp_path)
    assert sources(cli) == {"docs/alpha.md", "docs/new.md"}
    assert all(r["tokens"] <= 40 for r in cli("chunks", "ls", "--json").records)
    assert {r["status"] for r in cli("precompute", "--json").records} == {"unchanged"}
    assert cli("precompute", "--salt", "other").code == 3


def test_settings_of_the_environment_do_not_change_what_is_remembered(
    cli: Cli, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("precompute", "docs", "--chunk-tokens", "40")
    monkeypatch.setenv("CACHEBLEND_CHUNK_TOKENS", "20")
    monkeypatch.setenv("CACHEBLEND_COLLECTION", "work")
    assert {r["status"] for r in cli("precompute", "--json").records} == {"unchanged"}
    monkeypatch.delenv("CACHEBLEND_COLLECTION")
    assert cli("search", "alpha", "--collection", "work").code == 3


@pytest.mark.parametrize("flags", [("--include", "*.pdf"), ("--collection", "work"), ("--no-ignore",)])
def test_flags_that_change_what_is_remembered_need_a_path(cli: Cli, docs: Path, flags: tuple[str, ...]) -> None:
    cli("precompute", "docs")
    before = sources(cli)
    assert cli("precompute", *flags).code == 2
    assert sources(cli) == before


def test_old_command_names_are_usage_errors_that_name_the_new_command(cli: Cli) -> None:
    for old, new in (("sync", "cacheblend precompute"), ("watch", "cacheblend precompute --watch")):
        result = cli(old)
        assert result.code == 2
        assert new in result.err


def test_a_path_that_no_longer_exists_is_named(cli: Cli, docs: Path) -> None:
    cli("precompute", "docs")
    docs.rename(docs.parent / "moved")
    result = cli("precompute")
    assert result.code == 3
    assert str(docs) in result.err


def test_changes_of_hidden_files_and_of_the_store_do_not_matter(tmp_path: Path) -> None:
    wanted = _Relevant([str(tmp_path)], tmp_path / "store")
    for name, expected in {
        "a.md": True, "sub/a.md": True, ".gitignore": True, ".git/index": False, "sub/.a.md.swp": False, "store/data.mdb": False,
        "store": False, "stored/a.md": True,
    }.items():  # fmt: skip
        assert wanted(None, str(tmp_path / name)) == expected, name


@pytest.fixture
def watching(docs: Path, model: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    arguments = ["precompute", "docs", "--watch", "--model", str(model), "--store", "store"]
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
    assert any("watching docs" in line for line in lines)
    (docs / "alpha.md").write_text("# alpha\n\nsomebody else in Oslo\n")
    assert any("1 replaced" in line for line in lines)
    with ChunkStore.open(tmp_path / "store", mode="write", lock_timeout=120):
        pass  # between two runs nobody holds it
    (docs / "beta.md").unlink()
    assert any("is gone" in line for line in lines)
    assert any("1 removed" in line for line in lines)
    assert sources(cli) == {"docs/alpha.md"}
    (docs / "alpha.md").unlink()
    assert any("docs has none of its" in line for line in lines)
    assert sources(cli) == {"docs/alpha.md"}, "a drive may be gone"
    watching.send_signal(signal.SIGINT)
    assert watching.wait(timeout=120) == 130


def test_what_fails_is_tried_again(cli: Cli) -> None:
    from cacheblend_store import StoreLocked

    from cacheblend_cli.cli.output import Output
    from cacheblend_cli.cli.watch import follow
    from cacheblend_cli.collect.events import PrecomputeReport

    runs: list[str] = []

    def update() -> PrecomputeReport:
        runs.append("run")
        if len(runs) in (2, 3):
            raise StoreLocked("the store is busy", "wait")
        return PrecomputeReport(documents=1, new=1)

    follow([set(), {"a change"}, set(), set(), set()], update, Output(quiet=True))
    assert len(runs) == 4, "when watching began, at the change, two retries"


def test_a_remembered_folder_whose_name_is_not_utf8_is_found(cli: Cli, docs: Path) -> None:
    strange = docs.rename(docs.parent / "docs\udcff")
    assert cli("precompute", str(strange)).code == 0
    (strange / "gamma.md").write_text("gamma and more\n")
    result = cli("precompute", "--json")
    assert result.code == 0
    assert [r["status"] for r in result.records if r["source"].endswith("gamma.md")] == ["new"]
