"""cacheblend init: offers models that run well here, downloads the chosen one, and makes it the default of all
commands; nothing else of the user's settings changes."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheblend_kernels import compiled
from checkpoints import write_checkpoint
from command_line import Cli, in_process, process
from gguf_files import write_gguf
from hub_server import ID, serving

from cacheblend_cli.demo import model_dir
from cacheblend_cli.errors import ExitCode, ModelNotFound
from cacheblend_cli.model import hub, machine
from cacheblend_cli.model.catalogue import CATALOGUE, recommend, tokens_per_s
from cacheblend_cli.model.hub import HubName
from cacheblend_cli.model.machine import Machine
from cacheblend_cli.model.measured_ratios import MEASURED_RATIOS

GB = 10**9
SMALL = CATALOGUE[1]
HERE = Machine(16 * GB, 4, bytes_per_s=5 * GB)


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Commands in an empty folder, on a machine for which SMALL is recommended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CACHEBLEND_MODEL")
    monkeypatch.setattr(machine, "detect", lambda: HERE)
    return in_process(monkeypatch, capsys)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of fetched models. The hub has all of them."""
    found: list[str] = []

    def fetch(name: HubName) -> Path:
        found.append(name.text)
        return model_dir()

    monkeypatch.setattr(hub, "fetch", fetch)
    return found


def config() -> Path:
    return Path(os.environ["XDG_CONFIG_HOME"]) / "cacheblend/config.toml"


def default() -> str | None:
    return tomllib.loads(config().read_text()).get("model") if config().is_file() else None


@pytest.mark.parametrize(
    ("here", "name"),
    [
        (Machine(24 * GB, 2, bytes_per_s=12 * GB), "Qwen2.5-1.5B"),
        (Machine(2 * GB, 2, bytes_per_s=12 * GB), "Qwen2.5-0.5B"),
        (Machine(24 * GB, 2, bytes_per_s=1 * GB), "smollm2"),
        (Machine(64 * GB, 16, bytes_per_s=100 * GB), "Qwen3-8B"),
        (Machine(1 * GB, 64, bytes_per_s=100 * GB), "smollm2"),
        (Machine(64 * GB, 4), "smollm2"),
        (Machine(16 * GB, 4, gpu_bytes=24 * GB), "Qwen3-4B"),
        (Machine(16 * GB, 4, gpu_bytes=80 * GB), "Qwen3-8B"),
    ],
)
def test_the_best_model_that_runs_well_is_recommended(here: Machine, name: str) -> None:
    assert recommend(here).name == name


def test_the_catalogue_names_files_of_the_hub_and_ratios_that_are_known() -> None:
    names = [HubName.parse(m.model) for m in CATALOGUE[1:]]
    assert all(name.text.endswith("q4_k_m.gguf") or name.text.endswith("Q4_K_M.gguf") for name in names)
    assert {m.digest for m in CATALOGUE if m.digest} <= MEASURED_RATIOS.keys()
    assert len({m.name.lower() for m in CATALOGUE}) == len(CATALOGUE)


def test_speed_is_measured_here() -> None:
    here = machine.detect()
    assert here.memory_bytes > 0
    assert (here.bytes_per_s > 0) == compiled.multiplies(torch.float32)
    assert (tokens_per_s(CATALOGUE[0], HERE) or 0) > (tokens_per_s(CATALOGUE[-1], HERE) or 0) > 0
    assert tokens_per_s(SMALL, Machine(16 * GB, 4, gpu_bytes=24 * GB)) is None


def test_the_recommended_model_is_fetched_and_made_the_default(cli: Cli, fetched: list[str]) -> None:
    config().parent.mkdir(parents=True)
    config().write_text("# mine\nratio = 0.3\n")
    [record] = cli("init", "--yes", "--json").records
    assert (record["model"], record["recommended"], record["written"]) == (SMALL.model, SMALL.name, True)
    assert fetched == [SMALL.model]
    assert tomllib.loads(config().read_text()) == {"ratio": 0.3, "model": SMALL.model}
    assert config().read_text().startswith("# mine\n")
    assert cli("config", "show", "--json").records[0]["model"]["value"] == SMALL.model, "not a path beside the file"


@pytest.mark.parametrize("flags", [(), ("--json",), ("--dry-run",), ("--dry-run", "--yes"), ("-q",)])
def test_without_a_terminal_or_a_flag_nothing_is_downloaded(
    cli: Cli, fetched: list[str], flags: tuple[str, ...]
) -> None:
    told = cli("init", *flags)
    assert (told.code, fetched, default()) == (0, [], None)
    assert all(m.name in told.out for m in CATALOGUE)
    assert ("cacheblend init --yes" in told.err) == (flags in ((), ("--json",), ("--dry-run",)))


@pytest.mark.parametrize(
    ("typed", "chosen"),
    [("\n", SMALL), ("1\n", CATALOGUE[0]), ("0\nx\n7\n3\n", CATALOGUE[2]), ("q\n", None), ("", None)],
)
def test_on_a_terminal_one_is_chosen_by_its_number(
    cli: Cli, fetched: list[str], monkeypatch: pytest.MonkeyPatch, typed: str, chosen: Any
) -> None:
    monkeypatch.setattr("cacheblend_cli.model.named.smollm2_file", lambda: model_dir())
    monkeypatch.setattr("cacheblend_cli.cli.init.can_ask", lambda output: True)
    told = cli("init", stdin=typed)
    assert (told.code, default()) == (0, chosen and chosen.model), told.err
    assert told.err.count("type a number") == max(0, len(typed.split()) - 1)


def test_a_model_is_named_by_its_name_its_hub_id_or_its_path(cli: Cli, fetched: list[str], tmp_path: Path) -> None:
    shutil.copytree(model_dir(), tmp_path / "m")
    (tmp_path / "handbook").mkdir()
    for model, written in (
        (SMALL.name.upper(), SMALL.model),
        ("org/m:Q8_0.gguf", "org/m:Q8_0.gguf"),
        ("./m", str(tmp_path.resolve() / "m")),
        ("handbook", "handbook"),
    ):
        assert cli("init", "--model", model).code == 0
        assert default() == written
    assert fetched == [SMALL.model, "org/m:Q8_0.gguf"]


def test_a_setting_of_the_project_is_said_to_win(cli: Cli, tmp_path: Path) -> None:
    assert cli("config", "set", "model", "smollm2", "--project").code == 0
    told = cli("init", "--model", "handbook")
    assert default() == "handbook"
    assert f"{tmp_path / 'cacheblend.toml'} sets another model" in told.err


def test_offline_the_models_on_this_machine_are_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: HubName) -> Path:
        raise ModelNotFound(name.text, "the hub cannot be reached", "try again")

    monkeypatch.setattr(hub, "fetch", fetch)
    told = cli("init", "--yes")
    assert (told.code, default()) == (ExitCode.NOT_FOUND, None)
    assert "the hub cannot be reached" in told.err
    assert "handbook" in told.err


def test_what_cannot_be_used_is_refused_before_a_download(cli: Cli, fetched: list[str], tmp_path: Path) -> None:
    shutil.copytree(model_dir(), tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    told = cli("init", "--model", "./m")
    assert (told.code, "incomplete" in told.err) == (ExitCode.NOT_FOUND, True)
    assert (cli("init", "--model", "handbok").code, default()) == (ExitCode.NOT_FOUND, None)
    config().parent.mkdir(parents=True)
    config().write_text("model = = 3")
    assert cli("init", "--yes").code == ExitCode.USAGE
    assert (config().read_text(), fetched) == ("model = = 3", [])


def test_a_file_of_a_hub_is_downloaded_once_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own, as huggingface_hub reads the environment when it is imported."""
    (tmp_path / "repository").mkdir()
    write_checkpoint(tmp_path / "m", "llama-gqa")
    write_gguf(tmp_path / "m", tmp_path / "repository/m-Q8_0.gguf", "llama", "Q8_0")
    name = f"{ID}:m-Q8_0.gguf"
    monkeypatch.delenv("CACHEBLEND_MODEL")
    with serving(tmp_path / "repository") as server:
        for variable, value in {
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0",
        }.items():
            monkeypatch.setenv(variable, value)
        for _ in range(2):
            assert process("init", "--model", name, "--json").records[0]["written"]
        assert server.fetched == [("m-Q8_0.gguf", 0)]
        assert [r["model"] for r in process("models", "ls", "--json").records if r["default"]] == [name]
        assert process("doctor").code == 0, "it loads"
