"""Models of the Hugging Face hub: found in its cache or fetched. Only files that are read are fetched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cacheblend_cli.errors import ModelNotFound, UsageError
from cacheblend_cli.model.families import read_spec
from cacheblend_cli.model.model_files import SINGLE, SMALL_FILES, weight_names

NAME = re.compile(r"(?P<id>[^:@]+)(@(?P<revision>[^:]+))?(:(?P<file>.+\.gguf))?")
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True)
class HubName:
    """`ID`, `ID@REVISION`, `ID:FILE.gguf` or `ID@REVISION:FILE.gguf`."""

    text: str  # as given
    id: str
    revision: str | None  # a branch, a tag or a commit; None: main
    file: str | None  # the GGUF file, or None

    @classmethod
    def parse(cls, text: str) -> HubName:
        """Parse a hub id. Raises ModelNotFound for text that cannot be one."""
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        match = NAME.fullmatch(text)
        try:
            validate_repo_id(match["id"] if match else text)
        except HFValidationError as error:
            raise ModelNotFound(text, f"{text} is neither a directory nor a hub id", "check the path") from error
        assert match is not None  # no valid id has a colon
        return cls(text, match["id"], match["revision"], match["file"])


def cached(name: HubName) -> Path | None:
    """Return the directory or GGUF file of a model that is complete in the hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = [name.file] if name.file else list(SMALL_FILES)
    try:
        path = Path(snapshot_download(name.id, revision=name.revision, allow_patterns=patterns, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    if name.file:
        return path / name.file if (path / name.file).is_file() else None
    return path if _is_whole(path) else None


def fetch(name: HubName) -> Path:
    """Fetch missing files, after refusing unsupported models. Raises ModelNotFound, UsageError."""
    from huggingface_hub.errors import HTTPError

    try:
        return _fetch_gguf(name) if name.file else _fetch_checkpoint(name)
    except (HTTPError, OSError) as error:
        raise _explained(name, error) from error


def _fetch_checkpoint(name: HubName) -> Path:
    from huggingface_hub import snapshot_download

    path = Path(snapshot_download(name.id, revision=name.revision, allow_patterns=list(SMALL_FILES)))
    if not (path / "config.json").is_file() and (files := gguf_files(name)):
        raise UsageError(
            f"{name.id} holds GGUF files only",
            f"name one: {', '.join(f'{name.text}:{file}' for file in files[:4])}" + (", ..." if len(files) > 4 else ""),
        )
    read_spec(path)
    # at the commit of the configuration, even if the branch has moved since
    snapshot_download(name.id, revision=path.name, allow_patterns=[SINGLE])
    if not (path / SINGLE).is_file() and (shards := weight_names(path)):
        snapshot_download(name.id, revision=path.name, allow_patterns=shards)
    return path


def _fetch_gguf(name: HubName) -> Path:
    from huggingface_hub import hf_hub_download

    assert name.file is not None
    if PART.search(name.file):
        raise UsageError(
            f"{name.file} is one of several parts of a model, which are not read",
            "take a file that holds a whole model, or merge the parts with llama-gguf-split --merge",
        )
    return Path(hf_hub_download(name.id, name.file, revision=name.revision))


def gguf_files(name: HubName) -> list[str]:
    """Return the GGUF files of a repository that are models."""
    from huggingface_hub import HfApi

    files = HfApi().list_repo_files(name.id, revision=name.revision)
    return [f for f in files if f.endswith(".gguf") and not PART.search(f) and not Path(f).name.startswith("mmproj")]


def _is_whole(path: Path) -> bool:
    """Return whether the hub's cache has config.json and all weights: another tool may have fetched only some files."""
    names = weight_names(path)
    return bool(names) and all((path / name).is_file() for name in ("config.json", "tokenizer.json", *names))


def _explained(name: HubName, error: BaseException) -> BaseException:
    """Translate errors of the hub's library. A full disk stays an OSError."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{name.id}"
    if isinstance(error, errors.GatedRepoError):
        what = f"the hub gives {name.id} only to those who accepted its terms"
        hint = f"accept them on {page}, then run `hf auth login` or set HF_TOKEN"
    elif isinstance(error, errors.RepositoryNotFoundError):
        what = f"there is no directory {name.text}, and the hub has no model {name.id}, or it is private"
        hint = "check the name; for a private model run `hf auth login` or set HF_TOKEN"
    elif isinstance(error, (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)):
        what, hint = f"the hub has no {name.text}", f"the branches, tags and files of {name.id} are on {page}"
    elif any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in (error, error.__cause__)):
        what = f"model {name.text} is not a local directory and is not cached, and HF_HUB_OFFLINE forbids fetching it"
        hint = "set HF_HUB_OFFLINE=0, or give a local directory"
    elif isinstance(error, OSError) and error.errno is not None:
        return error
    else:
        missing = isinstance(error, errors.LocalEntryNotFoundError)  # its cause says why the hub did not help
        reason = type(error.__cause__ or error if missing else error).__name__
        what = f"model {name.text} is not a local directory, is not cached in full, and could not be fetched ({reason})"
        hint = "give a local directory, or check the network and the hub id, and try again: what was fetched is kept"
    return ModelNotFound(name.text, what, hint)
