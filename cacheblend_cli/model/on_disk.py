"""Models on this machine: built-in names, the hub's cache, GGUF files and checkpoints in a folder."""

from __future__ import annotations

from pathlib import Path

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.gguf_names import is_model
from cacheblend_cli.model.model_files import read_object, weight_names
from cacheblend_cli.model.named import HANDBOOK, SMOLLM2, smollm2_file


def models_on_disk(folder: Path) -> list[tuple[str, Path]]:
    """Return (value of --model, path) of every model found; `folder` and its subfolders are searched for files."""
    named = [(SMOLLM2, file)] if (file := smollm2_file()) is not None else []
    from cacheblend_cli.demo import model_dir

    found = [*named, (HANDBOOK, model_dir()), *_in_hub_cache()]
    patterns = ("config.json", "*.gguf", "*/config.json", "*/*.gguf")
    local = sorted({p.parent if p.name == "config.json" else p for pattern in patterns for p in folder.glob(pattern)})
    return found + [(_typed(p), p) for p in local if p.is_dir() or is_model(p.name)]


def _in_hub_cache() -> list[tuple[str, Path]]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    found = []
    for repository in repositories:
        for revision in repository.revisions if repository.repo_type == "model" else ():
            name, folder = repository.repo_id, revision.snapshot_path
            if "main" not in revision.refs:
                name += f"@{min(revision.refs, default=revision.commit_hash)}"
            if (folder / "config.json").is_file():
                found.append((name, folder))
            found += [
                (f"{name}:{file.relative_to(folder)}", file) for file in folder.rglob("*.gguf") if is_model(file.name)
            ]
    return sorted(found)


def kind_of(path: Path) -> str:
    """Return "GGUF", or "checkpoint" with its quantisation method, "incomplete" (no weights) or "damaged"."""
    if path.is_file():
        return "GGUF"
    try:
        names = weight_names(path)
        config = read_object(path / "config.json")
    except UsageError:
        return "damaged"
    if not names or not all((path / name).is_file() for name in names):
        return "incomplete"
    how = config.get("quantization_config")
    method = how.get("quant_method") if isinstance(how, dict) else None
    return f"checkpoint, {method}" if method else "checkpoint"


def _typed(path: Path) -> str:
    """Return the path as a value of --model that cannot be mistaken for a hub id."""
    return str(path) if path.is_absolute() else f"./{path}"
