"""cacheblend init: a model that fits the machine and is on its disk is written to cacheblend.toml, and nothing else of
the file changes."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
from cacheblend_cli.model.recommend import Machine, recommend

from cacheblend_cli.cli.main import run
from cacheblend_cli.demo import model_dir
from cacheblend_cli.errors import ExitCode
from cacheblend_cli.model import locate
from cacheblend_cli.model import recommend as machines

GB = 10**9


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        (Machine(1 * GB, 64), "smollm2"),
        (Machine(8 * GB, 2), "Qwen/Qwen3-0.6B"),
        (Machine(16 * GB, 4), "Qwen/Qwen3-1.7B"),
        (Machine(4 * GB, 4), "Qwen/Qwen3-0.6B"),
        (Machine(256 * GB, 64), "Qwen/Qwen3-8B"),
        (Machine(16 * GB, 4, gpu_bytes=24 * GB), "Qwen/Qwen3-4B-Instruct-2507"),
        (Machine(16 * GB, 4, gpu_bytes=80 * GB), "Qwen/Qwen3-8B"),
        (Machine(1 * 10**8, 1), "smollm2"),
    ],
)
def test_the_largest_model_that_runs_well_is_recommended(machine: Machine, name: str) -> None:
    assert recommend(machine).name == name


def on_disk(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let these models be on disk, on a machine for which Qwen3-1.7B is recommended."""
    found = {name: model_dir() for name in ("handbook", *names)}
    monkeypatch.setattr(locate, "find_local", lambda name: found.get(name))
    monkeypatch.setattr(machines, "detect", lambda: Machine(16 * GB, 4))


def test_the_recommended_model_is_written_if_it_is_here(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_disk(monkeypatch, "smollm2", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B")
    (here / "cacheblend.toml").write_text("# mine\nratio = 0.3\n")
    assert run(["init", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["model"], record["recommended"], record["get"]) == (
        "Qwen/Qwen3-1.7B",
        "Qwen/Qwen3-1.7B",
        "cacheblend models pull Qwen/Qwen3-1.7B",
    )
    assert tomllib.loads((here / "cacheblend.toml").read_text()) == {"ratio": 0.3, "model": "Qwen/Qwen3-1.7B"}
    assert "# mine" in (here / "cacheblend.toml").read_text()


def test_if_it_is_not_here_nothing_is_written(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_disk(monkeypatch, "smollm2", "Qwen/Qwen3-0.6B")
    assert run(["init"]) == 0
    assert not (here / "cacheblend.toml").exists()
    err = capsys.readouterr().err
    assert "wrote nothing" in err
    assert "cacheblend models pull Qwen/Qwen3-1.7B" in err


@pytest.mark.parametrize(
    ("model", "hint"), [("Qwen/Qwen3-0.6B", "cacheblend models pull Qwen/Qwen3-0.6B"), ("handbok", "handbook")]
)
def test_a_model_that_is_not_here_is_not_written(
    model: str, hint: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["init", "--model", model, "--force"]) == ExitCode.NOT_FOUND
    assert hint in capsys.readouterr().err
    assert not (here / "cacheblend.toml").exists()


def test_nor_is_one_without_its_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(model_dir(), here / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    assert run(["init", "--model", "./m"]) == ExitCode.NOT_FOUND
    assert "incomplete" in capsys.readouterr().err


def test_a_chosen_model_is_replaced_on_request_only(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk(monkeypatch, "smollm2")
    assert run(["init", "--model", "handbook", "-q"]) == 0
    assert run(["init", "--model", "smollm2", "-q"]) == ExitCode.USAGE
    assert tomllib.loads((here / "cacheblend.toml").read_text())["model"] == "handbook"
    assert run(["init", "--model", "smollm2", "--force", "-q"]) == 0
    assert tomllib.loads((here / "cacheblend.toml").read_text())["model"] == "smollm2"


def test_a_dry_run_writes_nothing(here: Path) -> None:
    assert run(["init", "--dry-run"]) == 0
    assert not (here / "cacheblend.toml").exists()


def test_a_file_that_is_not_toml_is_an_error_and_stays(here: Path) -> None:
    (here / "cacheblend.toml").write_text("model = = 3")
    assert run(["init"]) == ExitCode.USAGE
    assert (here / "cacheblend.toml").read_text() == "model = = 3"
