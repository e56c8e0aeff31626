"""config init, set and unset: files that read back with the given settings."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cacheblend_cli.settings import Settings, resolve
from cacheblend_cli.settings.sources import config_files

Cli = Callable[..., Any]


@pytest.fixture
def file(cli: Cli, tmp_path: Path) -> Path:
    return tmp_path / "cacheblend.toml"


def test_init_writes_every_setting_as_a_comment(cli: Cli, file: Path) -> None:
    assert cli("config", "init").code == 0
    text = file.read_text()
    assert tomllib.loads(text) == {}
    lines = [line.removeprefix("# ") for line in text.split("\n") if " = " in line]
    read = tomllib.loads("\n".join(lines))
    for name, default in vars(Settings()).items():
        assert read[name] == ("" if default is None else list(default) if isinstance(default, tuple) else default)
    assert cli("config", "init").code == 2
    file.write_text("top_k = 3\n")
    assert cli("config", "init", "--force").code == 0
    assert tomllib.loads(file.read_text()) == {}


def test_set_keeps_the_rest_of_the_file(cli: Cli, file: Path) -> None:
    file.write_text("# mine\ntop-k = 3  # few\nsystem = 'x'\n")
    assert cli("config", "set", "top_k", "7").code == 0
    assert cli("config", "set", "ratio", "auto").code == 0
    assert cli("config", "set", "template-var", "a=1", "b=x y").code == 0
    assert cli("config", "set", "model_sampling", "no").code == 0
    text = file.read_text()
    assert text.startswith("# mine\n")
    assert tomllib.loads(text) == {
        "top_k": 7, "system": "x", "ratio": "auto", "template_var": ["a=1", "b=x y"], "model_sampling": False,
    }  # fmt: skip
    settings = resolve({}).settings
    assert (settings.top_k, settings.ratio, settings.template_var) == (7, "auto", ("a=1", "b=x y"))
    assert cli("config", "unset", "top-k").code == 0
    assert resolve({}).settings.top_k == Settings().top_k
    assert cli("config", "unset", "top-k").code == 3


@pytest.mark.parametrize(
    "arguments", [("nothing", "1"), ("top_k", "many"), ("top_k", "0"), ("top_k", "1", "2"), ("model_sampling", "maybe")]
)
def test_what_is_no_setting_or_no_value_is_refused(cli: Cli, file: Path, arguments: tuple[str, ...]) -> None:
    assert cli("config", "set", *arguments).code == 2
    assert not file.exists()


def test_the_projects_file_is_found_from_below_and_paths_are_meant_from_it(
    cli: Cli, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("")
    (tmp_path / "sub/kv").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "sub")
    monkeypatch.delenv("CACHEBLEND_STORE")
    assert cli("config", "set", "store", "kv").code == 0
    assert tomllib.loads(file.read_text()) == {"store": "sub/kv"}
    assert resolve({}).settings.store_path == tmp_path / "sub/kv"


def test_a_file_that_is_no_toml_stays(cli: Cli, file: Path) -> None:
    file.write_text("= nonsense\n")
    assert cli("config", "set", "top_k", "7").code == 2
    assert file.read_text() == "= nonsense\n"


def test_an_unknown_setting_is_answered_in_short(cli: Cli, file: Path) -> None:
    for arguments in (("set", "max_tokns", "1"), ("set", "max-tokns", "1")):
        unknown = cli("config", *arguments)
        assert unknown.code == 2
        assert "did you mean max_tokens?" in unknown.err
    assert cli("config", "set", "nosuch", "1").err.splitlines()[1] == "hint: see: cacheblend config show --all"
    assert not file.exists()


def test_a_bad_value_is_said_of_the_setting(cli: Cli) -> None:
    assert cli("config", "set", "ratio", "banana").err.startswith(
        "error: ratio is 'banana', not a number, auto or model"
    )
    assert cli("config", "set", "top-k", "0").err.startswith("error: top_k is 0; the minimum is 1")
    assert cli("ask", "--ratio", "banana", "x").err.startswith("error: --ratio is 'banana'")


BAD = {
    "ratio": "2", "selector": "nosuch", "temperature": "-1",
    "top_p": "3", "repetition_penalty": "0", "max_tokens": "0", "chunk_tokens": "0", "overlap": "600", "window": "0",
    "neighbours": "-1", "state_every": "0", "device": "gpu", "gpu_memory_utilization": "7", "swap_space": "-3", "template_var": "x",
    "max_size": "lots", "keep_alive": "banana", "tier": "ftp://x", "ocr_languages": "deu eng", "allow_origin": "nowhere",
    "kl_mean": "-1",
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD.items())
def test_a_bad_value_is_refused_where_it_is_set_and_traced_where_it_is_read(
    cli: Cli, file: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    refused = cli("config", "set", "--project", name, "--", value)
    assert (refused.code, file.exists()) == (2, False)
    assert "--" not in refused.err
    monkeypatch.setenv(f"CACHEBLEND_{name.upper()}", value)
    read = cli("chunks", "ls")
    assert read.code == 2
    assert f"in CACHEBLEND_{name.upper()}" in read.err
    monkeypatch.delenv(f"CACHEBLEND_{name.upper()}")
    users = config_files()[0]
    users.parent.mkdir(parents=True, exist_ok=True)
    is_text = isinstance(getattr(Settings(), name), str) and name != "ratio"
    users.write_text(
        f"{name} = {[value] if isinstance(getattr(Settings(), name), tuple) else repr(value) if is_text else value}\n"
    )
    assert f"{name} in {users}" in cli("chunks", "ls").err
    shown = cli("config", "show")
    assert (shown.code, "\nratio " in shown.out, f"{name} in {users}" in shown.err) == (2, True, True)
    assert cli("config", "set", "--user", "top_k", "7").code == 0
    assert cli("config", "unset", "--user", name).code == 0
    assert cli("config", "show").code == 0


def test_settings_that_cannot_be_read_are_left_out_of_show(cli: Cli, file: Path) -> None:
    for text in ("mode = 'nosuch'\nnosuch = 1\ntop_k = 7\n", "top_k = \n"):
        file.write_text(text)
        shown = cli("config", "show", "--json")
        assert shown.code == 2
        assert shown.records[0]["mode"]["value"] == "blend"
        assert str(file) in shown.err
    assert cli("chunks", "ls").code == 2


def test_values_are_checked_together(cli: Cli, file: Path) -> None:
    for name, value, code in (
        ("overlap", "300", 2),
        ("chunk_tokens", "1024", 0),
        ("overlap", "300", 0),
        ("chunk_tokens", "512", 2),
    ):
        assert cli("config", "set", "--project", name, value).code == code


def test_an_error_about_a_flag_that_was_not_given_names_its_origin(cli: Cli, file: Path) -> None:
    """Also for values that only the model can refuse."""
    file.write_text("chunk_tokens = 100000\n")
    Path("a.md").write_text("Mara leads billing.\n")
    error = cli("precompute", "a.md").err
    assert f"(chunk_tokens in {file})" in error
    assert "--chunk-tokens 100000" not in error
    assert "--chunk-tokens 100000" in cli("precompute", "a.md", "--chunk-tokens", "100000").err


def test_show_has_common_settings_and_those_that_are_set(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CACHEBLEND_KEEP_ALIVE")
    monkeypatch.setenv("CACHEBLEND_SELECTOR", "hkvd")
    shown, every = cli("config", "show"), cli("config", "show", "--all")
    names = [line.split()[0] for line in shown.out.splitlines() if line]
    assert names[0] == "Common"
    assert {"model", "store", "ratio", "selector"} <= set(names)
    assert "swap_space" not in names
    left = len(vars(Settings())) - (len(names) - 3)  # three headings
    assert shown.err.splitlines()[-1] == f"{left} more settings have defaults; see: cacheblend config show --all"
    assert all(f"\n{name} " in every.out for name in vars(Settings()))
    assert every.err == ""
    assert every.out.index("\nratio ") < every.out.index("\nexpand ") < every.out.index("\nswap_space ")


def test_outside_a_project_the_users_file_is_edited(cli: Cli, file: Path) -> None:
    users = config_files()[0]
    assert f"top_k is 3 in {users}" in cli("config", "set", "top_k", "3").err
    assert not file.exists()
    assert f"in {file}" in cli("config", "set", "top_k", "4", "--project").err
    assert f"in {file}" in cli("config", "set", "top_k", "5").err
    assert [tomllib.loads(path.read_text()) for path in (users, file)] == [{"top_k": 3}, {"top_k": 5}]
    assert cli("config", "unset", "top_k").code == 0
    missing = cli("config", "unset", "top_k")
    assert (missing.code, missing.err.splitlines()[1]) == (3, f"hint: {users} does: --user")
    assert cli("config", "unset", "top_k", "--user").code == 0
    assert cli("config", "set", "top_k", "3", "--user", "--project").code == 2


def test_a_repository_is_one_project(cli: Cli, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert cli("config", "set", "top_k", "3").code == 0
    assert tomllib.loads(file.read_text()) == {"top_k": 3}
    assert not (tmp_path / "sub/cacheblend.toml").exists()


@pytest.mark.parametrize("command", [("precompute", "a.md"), ("ask", "who?"), ("doctor",)])
def test_a_configured_model_that_is_missing_is_traced_to_its_place(
    command: tuple[str, ...], cli: Cli, stored: list[str], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CACHEBLEND_MODEL")
    Path("a.md").write_text("Mara leads billing.\n")
    for flag, place in (("--user", config_files()[0]), ("--project", file)):
        assert cli("config", "set", "model", "nosuch", flag).code == 0
        missing = cli(*command)
        assert missing.code == 3
        assert f"no model nosuch on this machine (model in {place})" in missing.err
        assert f"to undo: cacheblend config unset model {flag}" in missing.err
        assert cli("config", "unset", "model", flag).code == 0
    monkeypatch.setenv("CACHEBLEND_MODEL", "nosuch")
    assert "(model in CACHEBLEND_MODEL)" in cli(*command).err
    assert "(model in" not in cli(*command, "--model", "nosuch").err
