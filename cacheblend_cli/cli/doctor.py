"""cacheblend doctor: does everything needed work here?"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import typer

from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "lmdb", "xxhash", "xformers", "triton")


def doctor(
    model: options.Model = None,
    store: options.Store = None,
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Check versions, device, store and model. Exits with the code of the first thing that is broken."""
    output = Output()
    settings = options.settings_of(model=model, store=store, device=device)
    facts: dict[str, Any] = {"versions": _versions(), "device": _device()}
    errors: list[Exception] = []
    for name, check in (("store", _store), ("model", _model)):
        try:
            facts[name] = check(settings)
        except Exception as error:
            errors.append(error)
            facts[name] = {"error": getattr(error, "message", str(error))}
    if json:
        output.json({**facts, "ok": not errors})
    else:
        for section, entries in facts.items():
            output.text(section)
            for name, value in entries.items():
                output.text(f"  {name:<20}{value}")
        output.text("everything works" if not errors else f"{len(errors)} broken")
    if errors:
        from cacheblend_cli.cli.exits import report

        raise typer.Exit(report(errors[0], output))


def _versions() -> dict[str, str]:
    found = {"cacheblend": importlib.metadata.version("cacheblend"), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _device() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    facts["cuda"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return facts


def _store(settings: Any) -> dict[str, Any]:
    from cacheblend_store import StoreNotFound

    path = settings.store_path
    try:
        with options.open_store(settings, write=False) as store:
            return {"path": str(path), **store.stats(), "damaged": len(store.damaged_keys())}
    except StoreNotFound:
        return {"path": str(path), "state": "not made yet"}


def _model(settings: Any) -> dict[str, Any]:
    engine = options.load_engine(settings, Output(quiet=True))
    return engine.describe()
