"""A project from elsewhere: its settings and its store are used only if the user trusts them."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Cli, process
from platformdirs import user_data_path

from cacheblend_cli import trust
from cacheblend_cli.settings import Settings, resolve
from cacheblend_cli.settings.identity import HARMLESS
from cacheblend_cli.settings.sources import config_files
from cacheblend_cli.sockets import socket_of

ASK = ("ask", "alpha", "--local", "--max-tokens", "4")


@pytest.fixture
def home(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run in a folder of the home directory, with only the model set."""
    monkeypatch.delenv("CACHEBLEND_STORE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "home"


@pytest.fixture
def checkout(cli: Cli, home: Path, docs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of another user's folder with a store, as a checkout brings it: the victim owns it, and stands in it."""
    evil = home.parent / "evil"
    monkeypatch.setenv("XDG_DATA_HOME", str(home.parent / "data of the attacker"))
    evil.mkdir()
    shutil.copytree(docs, evil / "docs")
    monkeypatch.chdir(evil)
    (evil / ".cacheblend").mkdir()
    assert cli("precompute", "docs", "-q").code == 0
    for file in (evil / ".cacheblend" / "store").iterdir():
        if file.name != "data.mdb":
            file.unlink()
    (evil / ".cacheblend" / "store" / "search.sqlite3").symlink_to("../../../.ssh/authorized_keys")
    monkeypatch.setenv("XDG_DATA_HOME", str(home / ".local" / "share"))
    clone = Path(shutil.copytree(evil, home / "clone", symlinks=True))
    monkeypatch.chdir(clone)
    return clone


@pytest.mark.parametrize("command", [("search", "alpha"), ASK, ("chunks", "ls"), ("chunks", "verify")])
def test_the_store_of_a_checkout_is_not_used(cli: Cli, checkout: Path, home: Path, command: tuple[str, ...]) -> None:
    result = cli(*command)
    assert result.code == 3
    assert f"warning: {checkout}/.cacheblend is not trusted: ignored store; to accept: cacheblend trust" in result.err
    assert str(home / ".local/share/cacheblend/store") in result.err
    assert list((home / ".ssh").iterdir()) == []
    assert sorted(f.name for f in (checkout / ".cacheblend/store").iterdir()) == ["data.mdb", "search.sqlite3"]


@pytest.mark.parametrize("target", ["missing", "empty", "a database"])
@pytest.mark.parametrize("command", [("search", "alpha"), ASK])
def test_a_link_in_a_store_that_is_named_is_not_followed(
    cli: Cli, checkout: Path, home: Path, command: tuple[str, ...], target: str
) -> None:
    keys = home / ".ssh" / "authorized_keys"
    if target == "empty":
        keys.touch()
    elif target == "a database":
        with sqlite3.connect(keys) as db:
            db.execute("CREATE TABLE places (url TEXT)")
    before = keys.read_bytes() if keys.exists() else None
    result = cli(*command, "--store", ".cacheblend/store")
    assert result.code == 4
    assert "search.sqlite3 is a symbolic link" in result.err
    assert "hint: remove it: rm" in result.err
    assert (keys.read_bytes() if keys.exists() else None) == before


def test_a_store_of_a_checkout_can_be_trusted(cli: Cli, checkout: Path) -> None:
    (checkout / ".cacheblend/store/search.sqlite3").unlink()
    assert cli("trust").out == f"trusted: {checkout}/.cacheblend/store\n"
    found = cli("search", "alpha")
    assert found.code == 0
    assert found.err == ""
    assert cli("trust", "--remove").out == f"no longer trusted: {checkout}/.cacheblend/store\n"
    assert cli("search", "alpha").code == 3


def test_an_own_project_works_without_a_question(cli: Cli, home: Path, docs: Path) -> None:
    Path(".cacheblend").mkdir()
    for command in (("precompute", str(docs)), ("precompute",), ("search", "alpha"), ASK, ("chunks", "verify")):
        result = cli(*command)
        assert result.code == 0, result.err
        assert "trust" not in result.err
    assert Path(".cacheblend/store/data.mdb").exists()
    assert Path(".cacheblend/.gitignore").read_text() == "*\n"
    assert not (user_data_path("cacheblend") / "store").exists()


def test_a_stamp_is_of_one_folder_and_one_user(
    cli: Cli, home: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.chdir(own)
    assert cli("precompute", str(docs), "-q", "--store", ".cacheblend/store").code == 0
    assert trust.project_folder() == Path(".cacheblend")
    own.rename(tmp_path / "renamed")
    monkeypatch.chdir(tmp_path / "renamed")
    assert trust.project_folder() == Path(".cacheblend")
    shutil.copytree(tmp_path / "renamed", tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    assert trust.project_folder() is None
    monkeypatch.chdir(tmp_path / "renamed")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "other"))
    assert trust.project_folder() is None
    trust.stamp(Path(".cacheblend"), "an identity")
    assert trust.project_folder() == Path(".cacheblend")
    secret = user_data_path("cacheblend") / "stamp-secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    secret.write_text("")  # a stamp without a secret could be forged
    assert trust.project_folder() is None


@pytest.fixture
def project(cli: Cli, home: Path, docs: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own project in whose store `git pull` puts the one of the checkout, as git does with ignored files."""
    project = home.parent / "project"
    monkeypatch.chdir(project)
    (project / ".cacheblend").mkdir()
    (project / "own.md").write_text("# Own\n\nMara leads billing.\n")
    assert cli("precompute", "own.md", "-q").code == 0
    _pull(checkout)
    return project


def _pull(checkout: Path) -> None:
    Path(".cacheblend/store/data.mdb").unlink()
    shutil.copy(checkout / ".cacheblend/store/data.mdb", ".cacheblend/store/data.mdb")


@pytest.mark.parametrize("named", [(), ("--store", ".cacheblend/store")])
@pytest.mark.parametrize("command", [("search", "alpha"), ASK, ("precompute", "own.md"), ("chunks", "compact")])
def test_a_store_that_replaced_the_own_one_is_neither_read_nor_written(
    cli: Cli, project: Path, command: tuple[str, ...], named: tuple[str, ...]
) -> None:
    before = Path(".cacheblend/store/data.mdb").read_bytes()
    result = cli(*command, *named)
    assert (result.code, result.out) == (4, "")
    assert "it was replaced" in result.err
    assert "cacheblend trust" in result.last
    assert Path(".cacheblend/store/data.mdb").read_bytes() == before


def test_trust_in_a_replaced_store_ends_when_it_is_replaced_again(cli: Cli, project: Path, checkout: Path) -> None:
    """Its author knows the identity that it came with."""
    assert cli("trust").code == 0
    assert "alpha" in cli("search", "alpha").out
    _pull(checkout)
    assert cli("search", "alpha").code == 4
    shutil.rmtree(".cacheblend/store")
    for command in (("precompute", "own.md"), ("search", "billing")):
        assert cli(*command).code == 0


def test_an_own_store_is_known_again(cli: Cli, home: Path, docs: Path) -> None:
    """After work that replaces data.mdb, and with the stamp of version 0.2.13, which is renewed."""
    Path(".cacheblend").mkdir()
    assert cli("precompute", str(docs), "-q").code == 0
    identity = trust.stamped(Path(".cacheblend"))
    backup = Path(shutil.copy(".cacheblend/store/data.mdb", home))
    assert cli("chunks", "compact").code == 0
    assert cli("search", "alpha").code == 0
    backup.replace(".cacheblend/store/data.mdb")
    assert cli("search", "alpha").code == 0

    trust.stamp(Path(".cacheblend"), "")
    stamp = Path(".cacheblend/stamp")
    stamp.write_text(stamp.read_text().removeprefix(":"))
    assert cli("search", "alpha").code == 0
    assert trust.stamped(Path(".cacheblend")) == identity


def test_a_store_that_is_a_link_is_not_used(cli: Cli, home: Path, docs: Path) -> None:
    """A checkout could choose any store of this user."""
    Path(".cacheblend").mkdir()
    assert cli("precompute", str(docs), "-q").code == 0
    Path(".cacheblend/store").rename(home / "other store")
    Path(".cacheblend/store").symlink_to(home / "other store")
    assert cli("search", "alpha").code == 3
    assert "is a symbolic link" in cli("trust").err
    assert trust.project_folder() is None


@pytest.mark.parametrize("kind", ["link", "file", "FIFO"])
def test_a_project_folder_that_is_not_a_directory_is_not_used(cli: Cli, home: Path, kind: str) -> None:
    (home / "elsewhere").mkdir()
    if kind == "link":
        Path(".cacheblend").symlink_to(home / "elsewhere")
    else:
        (os.mkfifo if kind == "FIFO" else Path.touch)(Path(".cacheblend"))
    assert trust.project_folder() is None
    assert ".cacheblend is not trusted" in resolve({}).ignored_note


def test_where_nothing_can_be_kept_a_new_store_is_told_to_be_named(
    cli: Cli, home: Path, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/proc/nowhere")
    Path(".cacheblend").mkdir()
    result = cli("precompute", str(docs))
    assert result.code == 0
    assert "--store .cacheblend/store" in result.err


# settings


def test_settings_that_lead_elsewhere_are_ignored_until_they_are_trusted(
    cli: Cli, home: Path, docs: Path, tmp_path: Path
) -> None:
    file = Path("cacheblend.toml").resolve()
    file.write_text(f"tier = 'file://{tmp_path}/exfil'\ntop_k = 3\n")
    Path("secret.md").write_text("The vault code is 99173 quartz.\n")
    result = cli("precompute", "secret.md", "--json")
    assert result.code == 0
    assert f"warning: {file} is not trusted: ignored tier; to accept: cacheblend trust\n" in result.err
    assert not (tmp_path / "exfil").exists()
    assert resolve({}).settings.top_k == 3

    answer = cli("ask", "vault code", "--local", "--max-tokens", "4", "--json")
    assert any("ignored tier" in note for note in answer.records[0]["notes"]), answer.out
    shown = cli("config", "show", "--json").records[0]
    assert shown["tier"] == {"value": "", "from": "default", "ignored": str(file)}
    assert f"default (ignored: {file})" in cli("config", "show").out

    assert cli("trust").out == f"trusted: {file}\n  tier = 'file://{tmp_path}/exfil'\n"
    assert resolve({}).settings.tier == f"file://{tmp_path}/exfil"
    assert cli("search", "vault").err == ""
    file.write_text(file.read_text() + "salt = 'x'\n")  # another content asks again
    assert resolve({}).settings.tier == ""
    assert "ignored tier, salt" in cli("search", "vault").err


def test_a_link_to_a_trusted_file_is_not_trusted(cli: Cli, home: Path) -> None:
    """Relative paths in it would be those of the checkout."""
    (home / "work").mkdir()
    (home / "work/cacheblend.toml").write_text("store = 'kv'\n")
    assert cli("trust", str(home / "work")).code == 0
    Path("cacheblend.toml").symlink_to(home / "work/cacheblend.toml")
    assert (resolve({}).settings.store, list(resolve({}).ignored)) == ("", ["store"])
    assert cli("trust").code == 0  # the user's own link
    assert resolve({}).settings.store == str(Path("kv").resolve())
    Path("link").symlink_to(home / "work")
    assert config_files(Path("link"))[1] == Path("link/cacheblend.toml").absolute()
    assert trust.is_trusted(Path("link/cacheblend.toml"), b"store = 'kv'\n")


@pytest.mark.parametrize(
    "text",
    [
        ".".join(["a"] * 30_000) + " = 1",
        "[" + ".".join(["a"] * 30_000) + "]",
        "x = " + "[" * 20_000,
        "x = " + "{a=" * 20_000,
        f"system = '{'a' * (64 << 10)}'",
    ],
    ids=["dotted key", "dotted table", "arrays", "inline tables", "large"],
)
def test_settings_that_would_take_long_to_parse_are_refused(cli: Cli, home: Path, text: str) -> None:
    """Every command in a checkout reads its settings. Without limits, a dotted key takes minutes."""
    Path("cacheblend.toml").write_text(text)
    for command in (("chunks", "ls"), ("config", "set", "--project", "top_k", "3")):
        result = cli(*command)
        assert result.code == 2
        assert str(Path("cacheblend.toml").resolve()) in result.err


@pytest.mark.parametrize("kind", ["sparse", "FIFO"])
def test_a_prompt_file_of_a_checkout_is_a_small_regular_file(cli: Cli, home: Path, docs: Path, kind: str) -> None:
    assert cli("precompute", str(docs), "-q").code == 0
    Path("cacheblend.toml").write_text("prompt = 'prompt.txt'\n")
    if kind == "FIFO":
        os.mkfifo("prompt.txt")
    else:
        Path("prompt.txt").touch()
        os.truncate("prompt.txt", 17 << 20)
    settings = resolve({}).settings
    assert socket_of(settings) == socket_of(replace(settings, prompt=""))
    result = cli("ask", "alpha")
    assert result.code in (2, 3)
    assert "prompt.txt" in result.err


def test_only_what_changes_answers_is_harmless(cli: Cli, home: Path) -> None:
    risky = {
        "store", "tier", "tier_key_file", "model", "lora", "embeddings", "keep_alive",
        "salt", "max_size", "force_store", "threads", "tensor_parallel", "swap_space", "kv_dtype",
    }  # fmt: skip
    harmless = {"top_k", "search", "ratio", "selector", "chunk_tokens", "temperature", "context", "system", "prompt"}
    assert not risky & HARMLESS
    assert harmless <= HARMLESS <= set(vars(Settings()))


def test_a_prompt_file_is_harmless_inside_the_project(cli: Cli, home: Path, tmp_path: Path) -> None:
    (home / "prompt.txt").write_text("{chunks} {question}")
    Path("prompt.txt").write_text("{chunks} {question}")
    Path("link.txt").symlink_to(home / "prompt.txt")
    for value, is_used in (
        ("prompt.txt", True),
        ("./prompt.txt", True),
        ("../home/prompt.txt", False),
        ("~/prompt.txt", False),
        ("link.txt", False),
        (str(home / "prompt.txt"), False),
    ):
        Path("cacheblend.toml").write_text(f"prompt = '{value}'\n")
        found = resolve({})
        assert (found.settings.prompt != "", "prompt" in found.ignored) == (is_used, not is_used), value


def test_what_the_user_says_is_not_reported_as_ignored(
    cli: Cli, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("cacheblend.toml").write_text("tier = 's3://b/p'\nmodel = 'other'\nstore = 'kv'\n")
    monkeypatch.setenv("CACHEBLEND_TIER", f"file://{tmp_path}")
    found = resolve({"store": "mine"})
    assert found.ignored == {}  # the model is one of the environment, too
    assert (found.settings.tier, found.settings.store) == (f"file://{tmp_path}", "mine")


@pytest.mark.parametrize("command", [("config", "set", "model", "handbook"), ("init", "--model", "handbook", "-q")])
def test_what_the_user_writes_is_trusted(
    cli: Cli, home: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CACHEBLEND_MODEL")
    Path("cacheblend.toml").write_text("ratio = 0.3\n")
    assert cli(*command).code == 0
    assert resolve({}).settings.model == "handbook"
    assert resolve({}).ignored == {}


def test_a_change_does_not_make_an_untrusted_file_trusted(cli: Cli, home: Path) -> None:
    Path("cacheblend.toml").write_text("tier = 'file:///exfil'\n")
    assert cli("config", "set", "top_k", "3").code == 0
    assert "tier" in resolve({}).ignored
    assert cli("config", "unset", "tier").code == 0
    assert resolve({}).ignored == {}


def test_trust_names_what_is_missing(cli: Cli, home: Path) -> None:
    assert (
        cli("trust").err.splitlines()[0] == f"error: {Path.cwd()} has neither a cacheblend.toml nor a .cacheblend/store"
    )
    assert cli("trust", "nowhere").code == 3
    Path("cacheblend.toml").write_text("tier = 'file:///x'\n")
    record = cli("trust", "--json").records[0]
    file = str(Path("cacheblend.toml").resolve())
    assert record == {"file": file, "settings": {"tier": "file:///x"}, "store": None, "trusted": True}
    Path("sub").mkdir()
    assert cli("trust", "sub", "--remove", "--json").records[0]["file"] == file
    assert "tier" in resolve({}).ignored


def test_a_record_that_is_damaged_trusts_nothing(cli: Cli, home: Path) -> None:
    Path("cacheblend.toml").write_text("tier = 'file:///x'\n")
    assert cli("trust").code == 0
    record = user_data_path("cacheblend") / "trusted.json"
    assert list(json.loads(record.read_text())) == [str(Path("cacheblend.toml").resolve())]
    for text in ("[]", "nonsense", '{"x": 5}'):
        record.write_text(text)
        assert "tier" in resolve({}).ignored


def test_writing_settings_follows_no_link_of_a_checkout(cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda count: bytes(count))  # as if the name had been guessed
    Path(".cacheblend.toml.00000000").symlink_to(home / ".ssh" / "authorized_keys")
    assert cli("config", "set", "top_k", "3", "--project").code == 2
    assert list((home / ".ssh").iterdir()) == []


def test_a_server_may_be_the_first_in_a_project(cli: Cli, home: Path, docs: Path) -> None:
    """Its socket is in the directory of the store before the store is."""
    Path(".cacheblend").mkdir()
    serving = process("serve", "--background", "--port", "0", "--idle-exit", "60")
    try:
        assert serving.code == 0, serving.err
        for command in (("serve", "--status"), ("precompute", str(docs)), ("search", "alpha")):
            result = cli(*command)
            assert result.code == 0, result.err
            assert "trust" not in result.err
    finally:
        cli("serve", "--stop")
    assert Path(".cacheblend/store/data.mdb").exists()
    assert not (user_data_path("cacheblend") / "store").exists()


@pytest.mark.parametrize("typed", ["..", "../child/..", "."])
def test_the_folder_that_is_named_is_the_one_that_is_trusted(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    """Not its child, from which `..` was typed."""
    parent = Path.cwd()
    child = parent / "child"
    child.mkdir()
    (child / "cacheblend.toml").write_text("tier = 's3://theirs/x'\n")
    monkeypatch.chdir(parent if typed == "." else child)
    assert cli("trust", typed).code == 3
    (parent / "cacheblend.toml").write_text("tier = 's3://mine/x'\n")
    assert cli("trust", typed, "--json").records[0]["file"] == str(parent / "cacheblend.toml")
    monkeypatch.chdir(child)
    assert "tier" in resolve({}).ignored
