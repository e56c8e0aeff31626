"""Two projects, their files written, renamed, moved, linked and deleted, paths typed in every way: what is found,
listed and cited is what a person who remembers their own commands would expect."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from cacheblend_store import ChunkStore, verify
from checkpoints import write_checkpoint
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cacheblend_cli.cli.main import run
from cacheblend_cli.collect.corpus_diff import Paths
from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.corpus.citations import Citations
from cacheblend_cli.corpus.scopes import holds, scope_here
from cacheblend_cli.corpus.search_index import searchable
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.types import AskRequest, Scope, SearchParams

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
PROJECTS = ("one", "two")
FOLDERS = ("one/docs", "one/docs/sub", "two/docs", "far")
FILES = tuple(f"{folder}/{name}.md" for folder in FOLDERS for name in "ab")
LINKS = ("one/docs/link", "two/docs/link", "two/docs/link.md")
TARGETS = ("far", "one/docs/sub", "far/a.md", "one/docs/a.md")
SPELT = st.integers(0, 4)
PLACES = ("", "one", "one/docs", "two", "two/docs", "far")
WORDS = ("anchor", "barrel", "candle", "donkey", "eleven", "falcon")
TEXTS = tuple(f"# {word}\n\nThe lead of billing keeps {word} at home near the harbor.\n" for word in WORDS)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("stateful") / "model"
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    write_checkpoint(path, "qwen2", **small, num_key_value_heads=1)
    return Engine.load(EngineConfig(model=str(path)))


def spellings(folder: Path, here: Path, path: Path) -> list[str]:
    """Ways to type a path: whole, relative, with detours, through a link to the folder that all is in."""
    relative = os.path.relpath(path, here)
    return [
        str(path),
        relative,
        f"./{relative}/" if path.is_dir() else f".//{relative}",
        f"{path.parent}/../{path.parent.name}/{path.name}",
        f"{folder}-link/{path.relative_to(folder)}",
    ]


class ProjectsMachine(RuleBasedStateMachine):
    """`disk` and `links` are the files; `stored` is what was precomputed, real path -> text, by a person's
    reckoning."""

    engine: Engine

    @initialize(texts=st.permutations(TEXTS), given=st.lists(st.sampled_from(FOLDERS[:3])))
    def make(self, texts: list[str], given: list[str]) -> None:
        self.before = Path.cwd()
        self.folder = Path(os.path.realpath(tempfile.mkdtemp(dir=MEMORY))) / "all"
        for place in FOLDERS:
            (self.folder / place).mkdir(parents=True)
        (self.folder / "one/.git").mkdir()
        (self.folder / "two/cacheblend.toml").write_text("")
        Path(f"{self.folder}-link").symlink_to(self.folder)
        self.disk: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self.stored: dict[str, str] = {}
        self.led: dict[str, set[str]] = {}  # a path that was precomputed -> what links below it led to then
        self.given: set[str] = set()
        self.store = ChunkStore.open(self.folder.parent / "store", mode="write")
        os.chdir(self.folder)
        for file, text in zip(FILES[::2], texts, strict=False):
            self.write(file, text)
        for path in given:
            self.precompute(path, 0)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            os.chdir(self.before)
            shutil.rmtree(self.folder.parent)

    # what happens on disk

    @rule(file=st.sampled_from(FILES), text=st.sampled_from(TEXTS))
    def write(self, file: str, text: str) -> None:
        (self.folder / file).write_text(text)
        self.disk[file] = text

    @rule(file=st.sampled_from(FILES))
    def delete(self, file: str) -> None:
        if self.disk.pop(file, None) is not None:
            (self.folder / file).unlink()

    @rule(file=st.sampled_from(FILES), to=st.sampled_from(FILES))
    def rename(self, file: str, to: str) -> None:
        if file in self.disk and file != to:
            (self.folder / file).rename(self.folder / to)
            self.disk[to] = self.disk.pop(file)

    @rule(link=st.sampled_from(LINKS), to=st.sampled_from(TARGETS))
    def make_link(self, link: str, to: str) -> None:
        self.remove_link(link)
        if link.endswith(".md") == to.endswith(".md"):
            (self.folder / link).symlink_to(self.folder / to)
            self.links[link] = to

    @rule(link=st.sampled_from(LINKS))
    def remove_link(self, link: str) -> None:
        if self.links.pop(link, None) is not None:
            (self.folder / link).unlink()

    @rule(file=st.sampled_from(FILES), to=st.sampled_from(FILES), spelt=SPELT)
    def move(self, file: str, to: str, spelt: int) -> None:
        """Only the target of the move is precomputed again."""
        self.rename(file, to)
        self.precompute(str(Path(to).parent), spelt)

    @rule(link=st.sampled_from(LINKS), to=st.sampled_from(TARGETS), spelt=SPELT)
    def link_and_unlink(self, link: str, to: str, spelt: int) -> None:
        self.make_link(link, to)
        self.precompute(str(Path(link).parent), spelt)
        self.remove_link(link)
        self.precompute(str(Path(link).parent), spelt)

    @rule(place=st.sampled_from(PLACES))
    def go_to(self, place: str) -> None:
        os.chdir(self.folder / place)

    # what is done with it

    @rule(path=st.sampled_from((*FOLDERS, "one", "two", *FILES)), spelt=SPELT)
    def precompute(self, path: str, spelt: int) -> None:
        if path.endswith(".md") and path not in self.disk:
            return
        typed = spellings(self.folder, Path.cwd(), self.folder / path)[spelt]
        reached = self.reached(path)
        known = set(self.stored.values())
        report = self.engine.precompute(
            self.store,
            Paths([typed], select={"follow": True}),
            PrecomputeOptions(chunk_tokens=24),
            lambda event: None,
            lambda difference: True,
            lambda folder, num_documents: True,
        )
        computed = {self.disk[file] for file in reached} - known
        assert (report.computed_tokens > 0) == bool(computed), "what is stored under another name is not computed again"
        assert report.documents == len(reached)
        self.expect(path, reached)

    @rule(path=st.sampled_from((*FOLDERS, *FILES)), spelt=SPELT)
    def remove(self, path: str, spelt: int) -> None:
        named = {file for file in self.stored if within(file, path)}
        typed = spellings(self.folder, Path.cwd(), self.folder / path)[spelt]
        code, _, err = self.command("chunks", "rm", "--source", typed, "--yes")
        assert code == 0 if named else code in (0, 3), err  # a folder without documents may be forgotten
        for file in named:
            del self.stored[file]
        for forgotten in [root for root in self.given if within(root, path)]:
            self.given.remove(forgotten)
            self.led.pop(forgotten, None)

    # at all times

    @invariant()
    def every_document_has_one_name_and_is_as_it_was_stored(self) -> None:
        if not hasattr(self, "store"):
            return
        _, out, _ = self.command("chunks", "ls", "--json")
        listed = {record["id"]: record["source"] for record in map(json.loads, out.splitlines())}
        citations, texts = Citations(self.store), dict[str, list[tuple[int, str]]]()
        for manifest in self.store.chunks():
            places = citations.all_of(manifest)
            assert places[0].source == listed.pop(manifest.id)
            for place in places:
                texts.setdefault(self.real(place.source), []).append((place.index, manifest.text))
        assert not listed
        assert {file: "".join(text for _, text in sorted(pieces)) for file, pieces in texts.items()} == self.stored

    @invariant()
    def a_search_finds_what_the_project_has(self) -> None:
        if not hasattr(self, "store"):
            return
        scope, expected = self.scope(), self.in_project()
        names = searchable(self.store)
        assert {self.real(os.path.relpath(name)) for name in names if holds(scope, name)} == expected
        for word in WORDS[:3]:
            wanted = {self.stored[file] for file in expected if word in self.stored[file]}
            code, out, _ = self.command("search", word, "-k", "20", "--json")
            found = [json.loads(line) for line in out.splitlines()]
            assert code == (0 if wanted else 3)
            assert {self.stored[self.real(r["source"])] for r in found} == wanted
            assert {self.real(r["source"]) for r in found} <= expected

    @invariant()
    def an_answer_cites_what_the_project_has(self) -> None:
        if not hasattr(self, "store") or not self.stored:
            return
        params = SearchParams(20, by="words", scope=self.scope())
        plan = self.engine.plan_of(
            self.engine.resolve(self.store, AskRequest("who keeps the lead at home?", search=params))
        )
        cited = {self.real(chunk.source) for chunk in plan.chunks}
        assert cited <= self.in_project()
        assert {self.stored[file] for file in cited} == {self.stored[file] for file in self.in_project()}
        assert {chunk.status for chunk in plan.chunks} <= {"exact", "blended"}

    @invariant()
    def the_store_is_whole(self) -> None:
        if hasattr(self, "store"):
            report = verify(self.store)
            assert report.ok
            assert report.missing == 0

    # a person's reckoning

    def reached(self, path: str) -> set[str]:
        """The files that a walk of the path comes by."""
        if path.endswith(".md"):
            return {path}
        found = {file for file in self.disk if within(file, path)}
        for link, to in self.links.items():
            if within(link, path):
                found |= self.reached(to) & self.disk.keys()
        return found

    def expect(self, path: str, reached: set[str]) -> None:
        """Expected contents after precomputing the path: its present documents; none that were deleted below it or
        below the target of its links; none reached only by a removed link; moved documents under their new names
        only."""
        for file in reached:
            self.stored[file] = self.disk[file]
        texts = {self.disk[file] for file in reached}
        lost = self.led.get(path, set()) - reached
        self.led[path] = {file for file in reached if not within(file, path)}
        self.given.add(path)
        broken = {to for link, to in self.links.items() if within(link, path) and to not in self.disk}
        for file in list(self.stored):
            gone = file not in self.disk and (within(file, path) or self.stored[file] in texts or file in broken)
            others = {f for p, files in self.led.items() if p != path for f in files}
            unlinked = file in lost and file not in others and not any(within(file, p) for p in self.given)
            if file not in reached and (gone or unlinked):
                del self.stored[file]

    def in_project(self) -> set[str]:
        """Documents that a search from here covers: all of them without a project, or if none of its documents is
        stored."""
        here = os.path.relpath(Path.cwd(), self.folder)
        project = next((p for p in PROJECTS if within(here, p)), None)
        led = {f for p, files in self.led.items() if project and within(p, project) for f in files}
        own = {file for file in self.stored if project and (within(file, project) or file in led)}
        return own or set(self.stored)

    def scope(self) -> Scope:
        return scope_here(self.store, searchable(self.store))[0]

    def real(self, shown: str) -> str:
        return os.path.relpath(os.path.normpath(Path.cwd() / shown), self.folder)

    def command(self, *arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        os.environ["CACHEBLEND_STORE"] = str(self.folder.parent / "store")
        with redirect_stdout(out), redirect_stderr(err):
            code = run(list(arguments))
        return code, out.getvalue(), err.getvalue()


def within(file: str, path: str) -> bool:
    return file == path or file.startswith(f"{path}/")


@pytest.mark.parametrize("examples", [3, pytest.param(400, marks=pytest.mark.torture)])
def test_any_sequence_of_commands_is_as_a_person_expects(
    engine: Engine, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHEBLEND_STORE", "")
    ProjectsMachine.engine = engine
    run_state_machine_as_test(
        ProjectsMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
