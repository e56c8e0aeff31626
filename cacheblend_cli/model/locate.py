"""Finding the files of a model by its name. Imports no torch: a missing model is reported before it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cacheblend_cli.errors import ModelNotFound, UsageError
from cacheblend_cli.model.model_files import weight_names
from cacheblend_cli.model.named import named_model

_LIST = "cacheblend models ls"


def locate(name: str) -> Path:
    """Return the directory or GGUF file of a model: of a built-in name, a local path, or a model of the hub, from its
    cache if possible, else fetched. Raises ModelNotFound, UsageError."""
    local = find_local(name)
    if local is not None:
        return local
    from cacheblend_cli.model.hub import HubName, fetch

    return fetch(HubName.parse(name))


def find_local(name: str) -> Path | None:
    """Return the directory or GGUF file of a model on this machine, None for a hub id that is not in the cache. Raises
    ModelNotFound for a name that is neither, UsageError for a path that is not a model."""
    local = named_model(name) or Path(name).expanduser()
    if local.is_dir() or (local.is_file() and local.suffix == ".gguf"):
        return local
    if local.exists():
        raise UsageError(f"{name} is neither a model directory nor a .gguf file", "give the directory that holds it")
    if name.startswith((".", "/", "~")):
        raise ModelNotFound(name, f"no model directory {name}", "check the path")
    from cacheblend_cli.model.hub import FORM, HubName, cached

    wanted = HubName.parse(name)
    found = cached(wanted)
    if found is None and "/" not in wanted.id:
        raise ModelNotFound(name, f"no model {name} on this machine", f"{_similar(name)}; {FORM}")
    return found


def check_on_disk(name: str) -> None:
    """Raise ModelNotFound for a model that is not on this machine with all its files, UsageError for a path that is
    not a model."""
    from cacheblend_cli.model.on_disk import kind_of

    path = find_local(name)
    if path is None:
        raise ModelNotFound(name, f"{name} is not on this machine", f"download it: cacheblend models pull {name}")
    if path.is_dir() and not any(path.glob("*.gguf")) and (kind := kind_of(path)) in ("incomplete", "damaged"):
        raise ModelNotFound(name, f"the model in {path} is {kind}", "fetch its files again")


def _similar(name: str) -> str:
    """Name the models at hand, the most similar one first."""
    from difflib import get_close_matches

    from cacheblend_cli.model.on_disk import models_on_disk

    known = [known for known, _ in models_on_disk(Path())]
    shown = {known.removeprefix("./").rpartition("/")[2].lower(): known for known in known}
    if similar := get_close_matches(name.lower(), shown, n=1):
        return f"did you mean {shown[similar[0]]}? see: {_LIST}"
    return f"at hand: {', '.join(known[:4])}{', ...' if len(known) > 4 else ''} (see: {_LIST})"


def resolve_model(name: str, say: Callable[[str], None] | None = None) -> Path:
    """Return the path of a model: of a built-in name; a local directory, or the one that stands for a GGUF file; else a
    model of the hub, from its cache if possible (see `locate`). say: called when a GGUF file is read for the first
    time."""
    found = locate(name)
    if found.is_dir() and weight_names(found):
        return found
    from cacheblend_cli.model.gguf_files.folders import gguf_in, model_dir_of

    if found.is_dir():
        found = gguf_in(found) or found
    return found if found.is_dir() else model_dir_of(found, say)
