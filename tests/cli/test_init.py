"""cacheblend init: a model that fits the machine is written to cacheblend.toml, and nothing else of the file
changes."""

import json
import tomllib
from pathlib import Path

import pytest

from cacheblend_cli.cli.main import run
from cacheblend_cli.errors import ExitCode
from cacheblend_cli.model.recommend import CANDIDATES, Machine, recommend

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


def test_it_writes_the_model_and_keeps_the_rest(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "cacheblend.toml").write_text("# mine\nratio = 0.3\n")
    assert run(["init", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["model"] in {c.name for c in CANDIDATES}
    assert tomllib.loads((here / "cacheblend.toml").read_text()) == {"ratio": 0.3, "model": record["model"]}
    assert "# mine" in (here / "cacheblend.toml").read_text()


def test_a_chosen_model_is_replaced_on_request_only(here: Path) -> None:
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
