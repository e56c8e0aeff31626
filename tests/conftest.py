"""Shared fixtures: a tiny engine with a store of chunks, on its own home."""

from __future__ import annotations

import gc
import importlib.metadata
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.dont_write_bytecode = False  # nor of the processes that tests start: each would compile this project again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

settings.register_profile(
    "repeatable", derandomize=True, max_examples=50, deadline=None
)  # judges a change, not its luck
settings.register_profile("torture", max_examples=300, deadline=None)  # of `make torture`, which looks for new faults
settings.load_profile("repeatable")

sys.path.insert(0, str(Path(__file__).parent / "support"))  # for `checkpoints`; the root stays off the path
sys.path += [str(Path(__file__).parents[1] / name) for name in ("connectors/ray", "connectors/vllm")]
os.environ["CACHEBLEND_MODEL"] = "handbook"  # of commands without --model: small, and there whatever is installed

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch, before it is imported: models here are tiny, and threads spin

os.environ["CACHEBLEND_KEEP_ALIVE"] = "0"  # or commands whose stderr is a terminal would leave engines running

os.environ["CACHEBLEND_SEARCH"] = "words"  # so that what is found depends on no weights that may be installed


def pytest_report_header() -> str:
    names = ("torch", "transformers", "lmdb", "safetensors", "typer", "tokenizers", "hypothesis")
    return "versions: " + ", ".join(f"{n} {importlib.metadata.version(n)}" for n in names)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):  # in a process that collects
        gc.disable()


def pytest_collection_finish() -> None:
    """Take what is loaded by now, torch, transformers and all test modules, out of the garbage collector's rounds."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton's bindings count leaks at the end


NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def _folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("t", numbered=False)  # short: sockets have 108 bytes for a path


@pytest.fixture
def tmp_path(_folders: Path, request: pytest.FixtureRequest) -> Path:
    """A folder of the test's own. pytest's fixture looks through those of all earlier tests for a number:
    milliseconds."""
    folder = _folders / f"{re.sub(r'[^a-zA-Z0-9_]', '_', request.node.name)[5:29]}-{next(NUMBERS)}"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session", autouse=True)
def _shipped_codec() -> Iterator[str]:
    """Store exact KV where a test names no codec, also in fixtures of modules: most tests compare with a full prefill.
    Yields the codec that users get."""
    from cacheblend_cli.prompt import collection

    with pytest.MonkeyPatch.context() as patch:
        shipped = collection.DEFAULT_CODEC
        patch.setattr(collection, "DEFAULT_CODEC", collection.EXACT)
        yield shipped


@pytest.fixture(scope="session", autouse=True)
def _matrices_stay_in_their_files() -> Iterator[None]:
    """Matrices of tiny models are loaded as those of published ones: mapped, or read when they are popped."""
    from cacheblend_cli.model import weights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "OWN_MAPPING", 256)
        yield


@pytest.fixture(autouse=True)
def _default_codec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _shipped_codec: str) -> None:
    """Tests marked `default_codec` store KV as users do."""
    if request.node.get_closest_marker("default_codec") is not None:
        from cacheblend_cli.prompt import collection

        monkeypatch.setattr(collection, "DEFAULT_CODEC", _shipped_codec)


@pytest.fixture(autouse=True)
def _own_home(_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's settings, caches or stores."""
    home = _folders / f"home-{next(NUMBERS)}"
    home.mkdir()
    for name, sub in (
        ("HOME", ""),
        ("XDG_CONFIG_HOME", "config"),
        ("XDG_DATA_HOME", "data"),
        ("XDG_CACHE_HOME", "cache"),
        ("XDG_STATE_HOME", "state"),
        ("XDG_RUNTIME_DIR", "run"),
    ):
        monkeypatch.setenv(name, str(home / sub))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
