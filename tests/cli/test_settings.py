"""Settings: precedence, origins, and errors for invalid values."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from command_line import Cli
from platformdirs import user_config_path

from cacheblend_cli import trust
from cacheblend_cli.cli.main import run
from cacheblend_cli.errors import ExitCode, UsageError
from cacheblend_cli.settings import DEFAULTS, GROUPS, Settings, resolve
from cacheblend_cli.settings.fields import REMOVED
from cacheblend_cli.settings.sources import parse_setting
from cacheblend_cli.types import overridden


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / ".git").mkdir()
    monkeypatch.delenv("CACHEBLEND_MODEL")
    monkeypatch.delenv("CACHEBLEND_SEARCH")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def user_file(text: str) -> Path:
    path = user_config_path("cacheblend") / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def trusted_file(here: Path, text: str) -> None:
    """Write the project's settings, as a user who trusts them."""
    (here / "cacheblend.toml").write_text(text)
    trust.trust(here / "cacheblend.toml", text.encode())


def test_flags_beat_variables_beat_the_project_beat_the_user(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = user_file("ratio = 0.1\nselector = 'first'\nmax_tokens = 1\nmode = 'full'\n")
    project = here / "cacheblend.toml"
    project.write_text("ratio = 0.2\nselector = 'random'\nmax-tokens = 2\n")
    monkeypatch.setenv("CACHEBLEND_RATIO", "0.3")
    monkeypatch.setenv("CACHEBLEND_SELECTOR", "all")
    found = resolve({"ratio": 0.4, "selector": None})
    s = found.settings
    assert (s.ratio, s.selector, s.max_tokens, s.mode, s.top_k) == (0.4, "all", 2, "full", None)
    names = ("ratio", "selector", "max_tokens", "mode", "top_k")
    assert [found.origin[n] for n in names] == ["flag", "CACHEBLEND_SELECTOR", str(project), str(user), "default"]


def test_the_project_file_is_found_above_but_not_outside_the_repository(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "cacheblend.toml").write_text("ratio = 0.2\n")
    (here / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(here / "deep" / "er")
    assert resolve({}).settings.ratio == 0.2
    (here / "deep" / ".git").mkdir()
    assert resolve({}).settings.ratio == "model"


def test_paths_in_a_file_are_relative_to_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trusted_file(here, "store = 'kv'\nmodel = 'models/tiny'\n")
    (here / "sub").mkdir()
    monkeypatch.chdir(here / "sub")
    assert resolve({}).settings.store_path == here / "kv"
    assert resolve({}).settings.model == "models/tiny"  # a hub id
    trusted_file(here, "store = 'kv'\nmodel = 'models/tiny:m.gguf'\n")
    assert resolve({}).settings.model == "models/tiny:m.gguf"  # of a hub id
    trusted_file(here, "store = 'kv'\nmodel = 'models/tiny'\n")
    (here / "models" / "tiny").mkdir(parents=True)
    assert resolve({}).settings.model == str(here / "models" / "tiny")
    assert resolve({"store": "mine"}).settings.store_path == Path("mine")


def test_where_the_store_is(here: Path) -> None:
    assert resolve({}).settings.store_path.parts[-2:] == ("cacheblend", "store")
    assert resolve({}).settings.store_path.is_absolute()
    (here / ".cacheblend").mkdir()
    assert resolve({}).settings.store_path == Path(".cacheblend/store")


def test_a_ratio_is_a_number_or_auto(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "cacheblend.toml").write_text("ratio = 'auto'\n")
    assert resolve({}).settings.ratio == "auto"
    assert resolve({"ratio": "0.3"}).settings.ratio == 0.3
    monkeypatch.setenv("CACHEBLEND_RATIO", "1")
    assert resolve({}).settings.ratio == 1.0
    assert resolve({"ratio": "auto"}).settings.ratio == "auto"
    with pytest.raises(UsageError, match=r"--ratio.*'Auto'"):
        resolve({"ratio": "Auto"})


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("ratoi = 0.1", "ratoi"),
        ("ratio = '0.1'", "ratio"),
        ("ratio = true", "ratio"),
        ("ratio = nan", "ratio"),
        ("temperature = nan", "temperature"),
        ("chunk_tokens = 1.5", "chunk_tokens"),
        ("model = 5", "model"),
        ("top_k = 0", "top_k"),
        ("[section]\nratio = 0.1", "section"),
        ("ratio =", "TOML"),
    ],
)
def test_a_bad_file_and_its_key_are_named(here: Path, text: str, key: str) -> None:
    trusted_file(here, text)
    with pytest.raises(UsageError, match=key) as caught:
        resolve({})
    assert str(here / "cacheblend.toml") in caught.value.message
    assert key != "ratoi" or "did you mean ratio" in (caught.value.hint or "")


def test_a_bad_variable_is_named_and_an_empty_one_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CACHEBLEND_KEEP_ALIVE")
    monkeypatch.setenv("CACHEBLEND_SEED", "")
    assert resolve({}).settings == Settings()
    monkeypatch.setenv("CACHEBLEND_SEED", "7")
    assert resolve({}).settings.seed == 7
    monkeypatch.setenv("CACHEBLEND_SEED", "x")
    with pytest.raises(UsageError, match="CACHEBLEND_SEED"):
        resolve({})
    monkeypatch.delenv("CACHEBLEND_SEED")
    monkeypatch.setenv("CACHEBLEND_SEEED", "7")
    with pytest.raises(UsageError, match="CACHEBLEND_SEEED"):
        resolve({})


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("seed = 'x'", "for example seed = 7"),
        ("ratio = 'some'", "for example ratio = 0.15"),
        ("threads = 5000", "for example threads = 4"),
        ("model = 5", 'for example model = "handbook"'),
        ("template_var = 1", 'for example template_var = ["enable_thinking=true"]'),
        ("[section]\nratio = 0.1", "settings have no sections: remove the line [section]"),
    ],
)
def test_a_hint_about_a_file_shows_a_right_line(here: Path, text: str, hint: str) -> None:
    trusted_file(here, text)
    with pytest.raises(UsageError) as caught:
        resolve({})
    assert caught.value.hint == hint


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_setting_says_what_to_do_wherever_it_is_set(
    cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    flag = f"--{name.replace('_', '-')}"
    for arguments in (("ask", "q", flag, "1"), ("config", "set", name, "1")):
        result = cli(*arguments)
        assert (result.code, "was removed" in result.err, REMOVED[name] in result.err) == (2, True, True), result.err
    monkeypatch.setenv(f"CACHEBLEND_{name.upper()}", "1")
    assert f"{REMOVED[name]}; unset CACHEBLEND_{name.upper()}" in cli("chunks", "ls").err
    monkeypatch.delenv(f"CACHEBLEND_{name.upper()}")
    (here / "cacheblend.toml").write_text(f"{name} = 1\n")
    assert f"{REMOVED[name]}; remove the line" in cli("chunks", "ls").err
    assert cli("config", "unset", "--project", name).code == 0
    with pytest.raises(UsageError, match="was removed"):
        overridden(DEFAULTS, {name: 1})


def test_a_flag_that_does_not_exist_is_no_setting(cli: Cli) -> None:
    for flag in ("--no-tier", "--no-ratio"):
        result = cli("ask", "q", flag)
        assert (result.code, "is a setting" in result.err) == (2, False), result.err
    assert "config set stop_repetition false" in cli("ask", "q", "--no-stop-repetition").err


def test_a_hint_about_a_value_has_the_form_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        resolve({"top_k": 0})
    assert caught.value.hint == "for example --top-k 5"
    with pytest.raises(UsageError) as caught:
        parse_setting("eager", ["maybe"])
    assert caught.value.hint == "for example: cacheblend config set eager false"
    monkeypatch.setenv("CACHEBLEND_SEED", "x")
    with pytest.raises(UsageError) as caught:
        resolve({})
    assert caught.value.hint == "for example CACHEBLEND_SEED=7"


def test_the_example_in_configs_is_valid(here: Path) -> None:
    example = Path(__file__).parents[2] / "configs" / "cacheblend.toml"
    trusted_file(here, example.read_text(encoding="utf-8"))
    assert resolve({}).settings.store_path == here / ".cacheblend" / "store"


def test_a_switch_is_true_or_false(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve({}).settings.eager is False
    assert resolve({"eager": True}).settings.eager is True
    trusted_file(here, "eager = true\n")
    assert resolve({}).settings.eager is True
    monkeypatch.setenv("CACHEBLEND_EAGER", "no")
    assert resolve({}).settings.eager is False
    for bad in ("maybe", "2"):
        monkeypatch.setenv("CACHEBLEND_EAGER", bad)
        with pytest.raises(UsageError):
            resolve({})
    monkeypatch.delenv("CACHEBLEND_EAGER")
    trusted_file(here, "eager = 1\n")
    with pytest.raises(UsageError):
        resolve({})
    (here / "cacheblend.toml").write_text("ratio = true\n")
    with pytest.raises(UsageError):
        resolve({})


def test_every_setting_is_of_one_group() -> None:
    names = [name for group in GROUPS.values() for name in group]
    assert sorted(names) == sorted(f.name for f in fields(Settings))


def test_the_key_of_a_server_is_not_a_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A secret in the environment is neither refused nor shown, and `serve` takes it: a bad one is refused there."""
    monkeypatch.setenv("CACHEBLEND_API_KEY", "short")
    assert run(["config", "show", "--json"]) == 0
    assert "short" not in capsys.readouterr().out
    assert run(["serve", "--model", "handbook"]) == ExitCode.USAGE
