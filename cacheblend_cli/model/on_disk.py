"""Models that are on this machine: those with a name, the hub's cache, GGUF files and checkpoints in a folder."""

from __future__ import annotations

from pathlib import Path

from cacheblend_cli.model.named import HANDBOOK, SMOLLM2, smollm2_file


def models_on_disk(folder: Path) -> list[tuple[str, Path]]:
    """(what --model takes, where it is). Of `folder`: its GGUF files and checkpoints, and those of the folders in it."""
    named = [(SMOLLM2, file)] if (file := smollm2_file()) is not None else []
    from cacheblend_cli.demo import model_dir

    found = [*named, (HANDBOOK, model_dir()), *_in_hub_cache()]
    patterns = ("config.json", "*.gguf", "*/config.json", "*/*.gguf")
    local = sorted({p.parent if p.name == "config.json" else p for pattern in patterns for p in folder.glob(pattern)})
    return found + [(_typed(p), p) for p in local if p.is_dir() or not p.name.startswith("mmproj")]


def _in_hub_cache() -> list[tuple[str, Path]]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    found = []
    for repository in repositories:
        newest = max(repository.revisions, key=lambda r: r.last_modified, default=None)
        if repository.repo_type == "model" and newest and (newest.snapshot_path / "config.json").is_file():
            found.append((repository.repo_id, newest.snapshot_path))
    return sorted(found)


def _typed(path: Path) -> str:
    """As --model takes it from here: a path that cannot be taken for a hub id."""
    return str(path) if path.is_absolute() else f"./{path}"
