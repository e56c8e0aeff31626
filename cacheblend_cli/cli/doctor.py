"""cacheblend doctor: check the installation."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import typer

from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.setting_checks import with_origin
from cacheblend_cli.cli.stores import open_store
from cacheblend_cli.cli.tier import describe
from cacheblend_cli.cli.units import format_size, with_kv_line
from cacheblend_cli.errors import ModelNotFound
from cacheblend_cli.settings import Resolved

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "lmdb", "xxhash", "xformers", "triton")


@options.with_settings("model", "lora", "store", "ratio", "device", "tier", "tier_key_file")
def doctor(resolved: Resolved, json: options.Json = False) -> None:
    """Check versions, store, device and model. Exits with the code of the first failed check."""
    from cacheblend_store import StoreCorrupt

    output, settings = Output(json=json), resolved.settings
    facts: dict[str, Any] = {}
    errors: list[Exception] = []
    # those that need no torch first: each is shown when it is known
    checks = {"versions": _versions, "store": _store, "device": _device, "backends": _backends, "model": _model}
    if settings.tier:
        checks["tier"] = describe
    for name, check in checks.items():
        try:
            facts[name] = check(settings)
            if name == "model":
                options.note_model(resolved, output)
        except Exception as error:
            shown = with_origin(error, resolved) if isinstance(error, ModelNotFound) else error
            errors.append(shown)
            facts[name] = {"error": getattr(shown, "message", str(shown))}
        if name == "store" and (damaged := facts[name].get("damaged")):
            message = f"{damaged} damaged records in {settings.store_path}"
            errors.append(StoreCorrupt(message, "repair: cacheblend chunks verify --repair"))
        output.text(name)
        for key, value in with_kv_line(facts[name]).items():
            if key == "max_bytes" and not value:
                value = "no quota"
            is_size = isinstance(value, int) and "bytes" in key
            output.text(f"  {key:<20}{format_size(value) if is_size else value}")
    output.result({**facts, "ok": not errors}, f"failed checks: {len(errors)}" if errors else "everything works")
    if errors:
        from cacheblend_cli.cli.exits import report

        raise typer.Exit(report(errors[0], output))


def _versions(settings: Any) -> dict[str, str]:
    found = {"cacheblend": importlib.metadata.version("cacheblend"), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _device(settings: Any) -> dict[str, Any]:
    import torch

    from cacheblend_cli.model.cpu import cpu_name
    from cacheblend_cli.model.device import resolve_device

    device = resolve_device(settings.device)
    facts: dict[str, Any] = {
        "cpu": f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "used": str(device),
        "cuda": _why_no_cuda(),
    }
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(index)
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        facts[f"cuda:{index}"] = (
            f"{found.name}, compute capability {found.major}.{found.minor}, {free:.1f} of {total:.1f} GiB free"
        )
    return facts


def _why_no_cuda() -> str:
    import torch

    if torch.version.cuda is None:
        return f"none: torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"none: torch is built for CUDA {torch.version.cuda}, but finds no GPU or driver"
    return torch.version.cuda


def _backends(settings: Any) -> dict[str, Any]:
    """Return the attention backends that run on the device, and the reasons why others do not. xformers, which takes
    seconds to import, is tried only if selected."""
    from cacheblend_kernels import BACKENDS, compiled, missing_for, select_backend

    from cacheblend_cli.model.device import resolve_device

    device = resolve_device(settings.device)
    tried = [name for name in BACKENDS if name != "xformers" or settings.attention_backend == name]
    facts = dict.fromkeys(BACKENDS, "not tried: set attention_backend to use it")
    for name, reason in missing_for(device, tried).items():
        facts[name] = "runs" if reason is None else f"does not run: {reason}"
    found = {**facts, "auto": select_backend("auto", device).name}
    if device.type == "cpu":
        built = compiled.library() is not None
        found["decoding"] = (
            "compiled" if built else "torch operations: the compiled code was not built or does not load"
        )
    return found


def _store(settings: Any) -> dict[str, Any]:
    from cacheblend_store import StoreNotFound, stats

    path = settings.store_path
    try:
        with open_store(settings, write=False) as store:
            return {"path": str(path), **stats(store).totals(), "damaged": len(store.damaged_keys())}
    except StoreNotFound:
        return {"path": str(path), "state": "does not exist yet"}


def _model(settings: Any) -> dict[str, Any]:
    from cacheblend_cli.types import BlendParams

    engine = options.load_engine(settings, Output(quiet=True))
    facts = engine.describe()
    blend, source = BlendParams.of(settings), "auto" if settings.ratio == "auto" else "given"
    if settings.ratio == "model":
        blend, source = engine.own_blend(blend)
    facts["ratio"] = f"{blend.effective_ratio():g}, {source}"
    return facts
