"""How threads wait: set before torch loads, and the user's own variables win."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cacheblend_cli.cli import main
from cacheblend_cli.cli.main import SPIN_COUNT, VARIABLES, limit_spinning


def test_the_entry_point_sets_a_short_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # put back afterwards, whatever the command sets
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["cacheblend", "--version"])
    with pytest.raises(SystemExit):
        main.main()
    assert os.environ["GOMP_SPINCOUNT"] == SPIN_COUNT


@pytest.mark.parametrize("name", VARIABLES)
def test_the_users_own_variable_wins(name: str) -> None:
    environment = {name: "1"}
    limit_spinning(environment)
    assert environment == {name: "1"}


def test_torchs_libgomp_reads_it_when_it_is_loaded() -> None:
    """The variable is set in a process that runs already; OMP_DISPLAY_ENV makes the library tell what it took."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.submodule_search_locations
    library = Path(torch.submodule_search_locations[0]) / "lib/libgomp.so.1"
    if not library.exists():
        pytest.skip("torch came without libgomp")
    code = f"import ctypes; from cacheblend_cli.cli.main import limit_spinning; limit_spinning(); ctypes.CDLL({str(library)!r})"
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES} | {"OMP_DISPLAY_ENV": "VERBOSE"}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" in told.stderr
