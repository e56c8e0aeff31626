"""Built-in model names, and the model used without --model."""

from __future__ import annotations

from pathlib import Path

import pytest

from cacheblend_cli.cli.main import run
from cacheblend_cli.demo import model_dir
from cacheblend_cli.errors import ExitCode, NotFoundError
from cacheblend_cli.model import named
from cacheblend_cli.model.locate import resolve_model


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "PACKAGE", "no-such-package")


def test_smollm2_is_the_default_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "no_such_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(named, "PACKAGE", "no-such-package")
    assert named.default_model() == "smollm2"
    assert named.named_model("smollm2") == package / "m.gguf"
    (package / "m.gguf").unlink()
    with pytest.raises(NotFoundError):
        named.default_model()


def test_without_its_package_there_is_no_default(no_package: None) -> None:
    assert resolve_model("handbook") == model_dir()
    for missing in (named.default_model, lambda: resolve_model("smollm2")):
        with pytest.raises(NotFoundError) as caught:
            missing()
        assert named.INSTALL in str(caught.value.hint)


def test_a_command_without_a_model_names_two_ways_to_get_one(
    no_package: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CACHEBLEND_MODEL")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.md").write_text("The rent is 900 EUR.\n")
    assert run(["precompute", "a.md", "--store", "store"]) == ExitCode.NOT_FOUND
    monkeypatch.setenv("CACHEBLEND_MODEL", "handbook")  # a flag would be remembered
    assert run(["precompute", "a.md", "--store", "store", "-q"]) == 0
    monkeypatch.delenv("CACHEBLEND_MODEL")
    capsys.readouterr()
    assert run(["ask", "What is the rent?", "--store", "store"]) == ExitCode.NOT_FOUND
    out, err = capsys.readouterr()
    assert not out
    assert named.INSTALL in err
    assert "cacheblend init" in err


def test_a_directory_of_that_name_is_given_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "handbook").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("handbook") == model_dir()
    assert resolve_model("./handbook") == Path("handbook")


def test_the_version_that_is_told_is_the_one_that_make_installs() -> None:
    pinned = (Path(__file__).parents[2] / "smollm2.txt").read_text().splitlines()
    assert pinned[-1].split(" --hash=")[0] == named.INSTALL.split()[-1]
