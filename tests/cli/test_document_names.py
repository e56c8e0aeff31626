"""A document has one name: its real path, shown from where the user stands, whatever was typed and wherever it is asked
for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from projects import JONAS, MARA, listed, write

Cli = Callable[..., Any]
WEAKLY = "Ulaanbaatar, capital of Mongolia, and its billing?"


def found(cli: Cli, *arguments: str) -> set[str]:
    return {r["source"] for r in cli("search", "billing", "-k", "20", "--json", *arguments).records}


def cited(cli: Cli, *arguments: str) -> set[str]:
    asked = cli("ask", "who leads billing?", "-k", "20", "--max-tokens", "2", "--json", *arguments)
    assert asked.code == 0, asked.err
    return {c["source"] for c in asked.records[0]["chunks"]}


@pytest.fixture
def projects(tmp_path: Path, cli: Cli) -> tuple[Path, Path]:
    """Two projects with a document of the same relative name each, both precomputed from within."""
    one, two = tmp_path / "one", tmp_path / "two"
    write(one / "docs/a.md", MARA)
    write(two / "docs/a.md", JONAS)
    (one / ".git").mkdir()
    (two / "cacheblend.toml").write_text("")
    for project in (one, two):
        os.chdir(project)
        assert cli("precompute", "docs").code == 0
    return one, two


@pytest.fixture(autouse=True)
def _back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # and where a test goes from here is undone after it


def test_two_projects_do_not_overwrite_each_other(cli: Cli, projects: tuple[Path, Path]) -> None:
    one, two = projects
    assert listed(cli) == {"docs/a.md", "../one/docs/a.md"}
    for project, text in ((one, "Mara"), (two, "Jonas")):
        os.chdir(project)
        [hit] = cli("search", "billing lead", "--json").records
        assert hit["source"] == "docs/a.md"
        assert text in hit["snippet"]
        assert cited(cli) == {"docs/a.md"}
        assert {r["status"] for r in cli("precompute", "docs", "--json").records} == {"unchanged"}


def test_a_search_is_of_the_project_and_says_so(cli: Cli, projects: tuple[Path, Path], tmp_path: Path) -> None:
    one, _ = projects
    os.chdir(one / "docs")
    verbose = cli("ask", "billing?", "--max-tokens", "2", "-v").err
    assert f"searching 1 of 2 documents, those below {one}; --all" in verbose
    for command in (("search", "billing"), ("ask", "billing?", "--max-tokens", "2")):
        assert "elsewhere" not in (said := cli(*command).err), "a good match"
        assert "searching" not in said
    for command in (("search", WEAKLY), ("ask", WEAKLY, "--max-tokens", "2")):
        assert cli(*command).err.count("1 document elsewhere was not searched: --all") == 1
        assert "elsewhere" not in cli(*command, "--all").err
    refused = cli("ask", WEAKLY, "--on-weak-match", "refuse")
    assert refused.code == 3
    assert "search other documents too (--all)" in refused.err
    assert found(cli) == cited(cli) == {"a.md"}
    both = {"a.md", "../../two/docs/a.md"}
    assert found(cli, "--all") == cited(cli, "--all") == both
    assert "below" not in cli("search", "billing", "--all").err
    assert found(cli, "--source", "../../two") == cited(cli, "--source", "../../two/docs/*.md") == both - {"a.md"}
    assert cli("ask", "billing?", "--source", "nowhere/*").code == 3
    for command in (("search", "Jonas"), ("ask", "Jonas?")):
        elsewhere = cli(*command)
        assert elsewhere.code == 3
        assert "other stored documents match (1 document elsewhere was not searched)" in " ".join(elsewhere.err.split())
        assert "hint: search them too: --all" in elsewhere.err
    os.chdir(tmp_path)
    assert "searching" not in cli("search", "billing").err, "all are searched, which says nothing"
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "cacheblend.toml").write_text("")
    os.chdir(tmp_path / "none")
    assert f"none of them is below {tmp_path / 'none'}" in cli("search", "billing").err
    (tmp_path / "cacheblend.toml").write_text("")
    os.chdir(tmp_path)
    for command in (
        ("search", "billing"),
        ("ask", "billing?", "--max-tokens", "2", "-v"),
        ("chunks", "ls"),
        ("chunks", "stats"),
    ):
        said = cli(*command)
        assert said.code == 0
        assert "searching" not in said.err, "no others"
        assert "--all" not in said.err
    assert found(cli) == {"one/docs/a.md", "two/docs/a.md"}
    (tmp_path / "new/.git").mkdir(parents=True)
    os.chdir(tmp_path / "new")
    assert f"{tmp_path / 'new'}" in cli("search", "billing").err
    assert len(found(cli)) == 2


def test_one_file_is_one_document_however_it_is_typed(cli: Cli, tmp_path: Path) -> None:
    file = write(tmp_path / "docs/sub/a.md", MARA)
    (tmp_path / "link").symlink_to(tmp_path / "docs")
    (tmp_path / "docs/b.md").symlink_to(file)
    spelt = [
        "docs/sub/a.md",
        "./docs//sub/../sub/a.md",
        str(file),
        "link/sub/a.md",
        "docs/b.md",
        "link",
        "docs/sub",
        ".",
    ]
    for number, path in enumerate(spelt):
        records = cli("precompute", path, "--json").records
        assert {(r["source"], r["status"]) for r in records} == {("docs/sub/a.md", "unchanged" if number else "new")}
    os.chdir(tmp_path / "docs/sub")
    assert {r["status"] for r in cli("precompute", "a.md", "--json").records} == {"unchanged"}
    assert listed(cli) == found(cli) == cited(cli) == {"a.md"}
    os.chdir(tmp_path)
    assert listed(cli) == found(cli) == cited(cli) == {"docs/sub/a.md"}
    for path in (*spelt[:4], "docs/*/a.md", "**/a.md", f"{tmp_path}/*", "link/su?"):
        assert listed(cli, "--source", path) == {"docs/sub/a.md"}, path
    for path in ("a.md", "docs/a.md", "docs/su", "d?/a.md"):
        assert listed(cli, "--source", path) == set()
    assert cli("chunks", "rm", "--source", "link/sub").code == 0
    assert listed(cli) == set()


def test_a_new_version_is_the_only_one_wherever_it_is_stored_from(cli: Cli, tmp_path: Path) -> None:
    file = write(tmp_path / "docs/a.md", MARA)
    assert cli("precompute", "docs").code == 0
    write(file, JONAS)
    os.chdir(tmp_path / "docs")
    assert cli("precompute", str(file)).code == 0
    [hit] = cli("search", "billing lead", "--json").records
    assert "Jonas" in hit["snippet"]


@pytest.mark.parametrize("flags", [(), ("--context", "sink"), ("--context", "neighbours")])
def test_a_renamed_document_is_not_computed_again_and_its_old_name_goes(
    cli: Cli, docs: Path, flags: tuple[str, ...]
) -> None:
    ids = {r["id"] for r in cli("precompute", "docs", *flags, "--json").records}
    (docs / "alpha.md").rename(docs / "gamma.md")
    again = cli("precompute", "docs", *flags, "--json")
    assert {r["status"] for r in again.records} == {"unchanged"}
    assert "docs/gamma.md" in again.err
    assert {r["id"] for r in again.records} == ids
    names = {"docs/beta.md", "docs/gamma.md"}
    assert listed(cli) == names
    assert {r["source"] for r in cli("search", "alpha", "-k", "9", "--json").records} == {"docs/gamma.md"}
    asked = cli("ask", "alpha beta?", "-k", "9", "--max-tokens", "2", "--json").records[0]
    assert {c["source"] for c in asked["chunks"]} == names
    shown = cli("chunks", "show", next(iter(ids))).out
    assert "alpha.md" not in shown


def test_a_moved_project_takes_its_documents_along(cli: Cli, projects: tuple[Path, Path], tmp_path: Path) -> None:
    one, _ = projects
    one.rename(tmp_path / "three")
    os.chdir(tmp_path / "three")
    assert {r["status"] for r in cli("precompute", "docs", "--json").records} == {"unchanged"}
    assert listed(cli) == {"docs/a.md", "../two/docs/a.md"}


def test_a_document_that_two_projects_share_is_cited_by_its_own_name_in_each(cli: Cli, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name / "docs" / f"{name}.md", MARA)
        (tmp_path / name / ".git").mkdir()
        os.chdir(tmp_path / name)
        statuses = {r["status"] for r in cli("precompute", ".", "--json").records}
        assert statuses == {"new" if name == "one" else "unchanged"}
    for name in ("one", "two"):
        os.chdir(tmp_path / name)
        assert listed(cli) == found(cli) == cited(cli) == {f"docs/{name}.md"}
    [chunk] = cli("chunks", "ls", "--json").records
    assert chunk["also_in"] == ["../one/docs/one.md#0"]
    assert cli("chunks", "show", chunk["id"], "--json").records[0]["also_in"] == ["../one/docs/one.md#0"]
    assert cli("chunks", "rm", "--source", "docs/two.md").code == 0
    assert listed(cli) == {"../one/docs/one.md"}


def test_a_text_in_two_files_is_shown_with_both_names(cli: Cli, tmp_path: Path) -> None:
    own, copy = "docs/billing.md", "docs/billing copy.md"
    write(tmp_path / own, MARA)
    write(tmp_path / copy, MARA)
    cli("precompute", "docs")
    [chunk] = cli("chunks", "ls", "--json").records
    assert (chunk["source"], chunk["also_in"]) == (own, [f"{copy}#0"])
    assert cli("chunks", "ls", "-q").out.split() == [chunk["id"]]
    for arguments in ((), ("--limit", "1")):
        table = cli("chunks", "ls", *arguments)
        assert [f"{name}#0" in table.out for name in (own, copy)] == [True, True]
        assert "1 chunk, " in table.err
    one = cli("chunks", "ls", "--source", copy)
    assert copy in one.out
    assert own not in one.out
    assert copy in cli("chunks", "show", chunk["id"]).out
    [hit] = cli("search", "billing lead", "--json").records
    assert {hit["source"], *hit["also_in"]} == {own, copy}
    found = cli("search", "billing lead")
    assert all(name in found.out + found.err for name in (own, copy))
    asked = ("ask", "billing lead?", "--max-tokens", "2", "--local")
    [used] = cli(*asked, "--json").records[0]["chunks"]
    assert (used["source"], used["also_in"]) == (own, [copy])
    [line] = [line for line in cli(*asked).err.splitlines() if line.startswith(("source", "nearest"))]
    assert copy in line
    (tmp_path / copy).unlink()
    assert f"{copy} is gone; {own} has the same text" in cli("precompute").err
    assert cli("chunks", "ls", "--json").records[0]["also_in"] == []


def test_a_changed_document_leaves_nothing_of_its_old_text_in_another_codec(cli: Cli, tmp_path: Path) -> None:
    file = write(tmp_path / "a.md", MARA)
    assert cli("precompute", "a.md", "--kv-dtype", "exact").code == 0
    assert cli("precompute", "a.md", "--kv-dtype", "int4", "--yes").code == 0
    write(file, JONAS)
    assert cli("precompute", "a.md").code == 0
    assert all("Jonas" in r["snippet"] for r in cli("search", "billing lead", "--json").records)
    file.unlink()
    write(tmp_path / "b.md", "something else\n")
    assert "a.md" in cli("precompute", ".").err
    assert listed(cli) == {"b.md"}


def test_a_search_of_all_models_finds_what_a_document_says_now(cli: Cli, tmp_path: Path) -> None:
    file = write(tmp_path / "a.md", MARA)
    assert cli("precompute", "a.md", "--dtype", "bfloat16").code == 0
    write(file, JONAS)
    assert cli("precompute", "a.md", "--dtype", "float32").code == 0
    [hit] = cli("search", "billing lead", "--json").records
    assert "Jonas" in hit["snippet"]
    assert cli("precompute", "a.md", "--dtype", "bfloat16").code == 0
    [hit] = cli("search", "billing lead", "--json").records
    assert "Jonas" in hit["snippet"]


def test_deleted_documents_are_removed_for_every_model_and_salt(cli: Cli, docs: Path) -> None:
    everyone = ((), ("--dtype", "bfloat16"), ("--salt", "x"))
    counts = {flags: len(cli("precompute", "docs", *flags, "-q").out.split()) for flags in everyone}
    (docs / "beta.md").unlink()
    (docs / "alpha.md").rename(docs / "gamma.md")
    [facts] = cli("precompute", "docs", "--dry-run", "--json").records
    result = cli("precompute", "docs")
    assert f"{facts['removed']['chunks']} removed" in result.err
    assert result.err.count("docs/beta.md") == 1
    assert listed(cli) == found(cli) == {"docs/gamma.md"}
    for flags, count in counts.items():
        records = cli("precompute", "docs", *flags, "--json").records
        assert {(r["source"], r["status"]) for r in records} == {("docs/gamma.md", "unchanged")}
        assert len(records) < count


def test_a_project_has_what_its_links_lead_to(cli: Cli, projects: tuple[Path, Path], tmp_path: Path) -> None:
    one, two = projects
    write(tmp_path / "wiki/page.md", "# Wiki\n\nbilling was in Oslo\n")
    write(tmp_path / "far/other.md", "billing is far\n")
    (one / "wiki").symlink_to(tmp_path / "wiki")
    (two / "docs/linked.md").symlink_to(tmp_path / "far/other.md")
    os.chdir(one)
    assert cli("precompute", "wiki").code == 0
    assert found(cli) == cited(cli) == {"docs/a.md", "../wiki/page.md"}
    assert found(cli, "--source", "wiki") == {"../wiki/page.md"}
    os.chdir(two)
    assert cli("precompute", "docs", "--follow").code == 0
    assert found(cli) == cited(cli) == {"docs/a.md", "../far/other.md"}
    (two / "docs/linked.md").unlink()
    assert cli("precompute", "docs").code == 0
    assert found(cli) == {"docs/a.md"}


def test_stdin_is_a_document_of_the_project_it_is_piped_in(cli: Cli, projects: tuple[Path, Path]) -> None:
    one, two = projects
    for project, text in ((one, "billing moved to Bergen\n"), (two, "billing moved to Oslo\n")):
        os.chdir(project / "docs")
        assert cli("precompute", "-", stdin=text).code == 0
    for project, town in ((one, "Bergen"), (two, "Oslo")):
        os.chdir(project)
        hits = {r["source"]: r["snippet"] for r in cli("search", "billing", "--json").records}
        assert set(hits) == {"-", "docs/a.md"}
        assert town in hits["-"]
    assert cli("precompute", ".").code == 0
    assert "-" in listed(cli), "nobody said that it is gone"
    assert cli("chunks", "rm", "--source", "-").code == 0
    assert listed(cli) == {"docs/a.md", "../one/docs/a.md", "../one/-"}


def test_a_push_names_documents_from_where_it_is_made_and_they_land_where_it_is_pulled(
    cli: Cli, projects: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = projects
    os.chdir(one)
    url = f"file://{tmp_path}/tier"
    assert cli("chunks", "push", url, "--source", "docs").code == 0
    assert not any(
        str(tmp_path).encode() in file.read_bytes() for file in (tmp_path / "tier").rglob("*") if file.is_file()
    )
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "other"))
    write(tmp_path / "there/docs/a.md", MARA)
    os.chdir(tmp_path / "there")
    assert cli("chunks", "pull", url).code == 0
    assert listed(cli) == found(cli) == {"docs/a.md"}
    assert {r["status"] for r in cli("precompute", "docs", "--json").records} == {"unchanged"}
    assert listed(cli) == {"docs/a.md"}


def test_names_survive_json_unchanged(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "docs/a b\tc[1]*.md", MARA)
    assert cli("precompute", "docs").code == 0
    assert listed(cli) == {"docs/a b\tc[1]*.md"}
    assert listed(cli, "--source", "docs/a b\tc[1]*.md") == {"docs/a b\tc[1]*.md"}
    assert json.loads(cli("search", "billing", "--json").out)["source"] == "docs/a b\tc[1]*.md"
