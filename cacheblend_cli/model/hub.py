"""Models of the Hugging Face hub: found in its cache or fetched. Only files that are read are fetched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cacheblend_cli import user_cache
from cacheblend_cli.errors import ModelNotFound, UsageError
from cacheblend_cli.model.download import download
from cacheblend_cli.model.gguf_names import PART, defaults, is_read, of_quant, quant_of, whole_models
from cacheblend_cli.model.model_files import INDEX, SINGLE, SMALL_FILES, weight_names

NAME = re.compile(
    r"(?:(?:https://)?(?:huggingface\.co|hf\.co)/|hf://)?"
    r"(?P<id>(?:\w[\w.-]*/)?\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?(:(?P<tag>\w[^:]*\.gguf|\w[\w.-]*))?",
    re.ASCII,
)
FORM = "a hub id is OWNER/NAME, with :QUANT or :FILE.gguf for a GGUF file, such as Qwen/Qwen3-1.7B-GGUF:Q8_0"


@dataclass(frozen=True)
class HubName:
    """`ID`, `ID@REVISION`, and each with `:FILE.gguf` or `:QUANT`."""

    text: str  # as given
    id: str
    revision: str | None  # a branch, a tag or a commit; None: main
    tag: str | None  # a GGUF file, a quantisation, or None

    @classmethod
    def parse(cls, text: str) -> HubName:
        """Parse a hub id, also one that begins with hf.co/, as for ollama. Raises ModelNotFound for other text."""
        match = NAME.fullmatch(text)
        if match is None or ".." in text:
            raise ModelNotFound(text, f"{text} is neither a directory nor a hub id", f"check the path; {FORM}")
        return cls(text, match["id"], match["revision"], match["tag"])

    @property
    def repository(self) -> str:
        """ID or ID@REVISION."""
        return f"{self.id}@{self.revision}" if self.revision else self.id

    @property
    def cache(self) -> Path:
        """Folder of the repository in the hub's cache."""
        from huggingface_hub import constants  # imports nothing else

        return Path(constants.HF_HUB_CACHE) / f"models--{self.id.replace('/', '--')}"

    @property
    def record(self) -> Path:
        """File that keeps which GGUF file was chosen for a name without a tag."""
        return user_cache.place("hub", self.repository)


def cached(name: HubName) -> Path | None:
    """Return the directory or GGUF file of a model that is complete in the hub's cache. Does not import
    huggingface_hub's functions, which takes .2 s. Raises UsageError if several files have the quantisation."""
    revision = name.revision or "main"
    ref = name.cache / "refs" / revision
    snapshot = name.cache / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision)
    if name.tag is None and _is_whole(snapshot):
        return snapshot
    if name.tag is None:
        files = [file] if (file := user_cache.recall(name.record)) else []
    elif name.tag.endswith(".gguf"):
        files = [name.tag]
    else:
        files = of_quant(whole_models(str(p.relative_to(snapshot)) for p in snapshot.rglob("*.gguf")), name.tag)
    found = [file for file in files if (snapshot / file).is_file()]
    return snapshot / _only(name, found) if found else None


def fetch(name: HubName) -> Path:
    """Fetch missing files, after refusing unsupported models. Raises ModelNotFound, UsageError."""
    from huggingface_hub.errors import HFValidationError, HTTPError

    if "/" not in name.id:
        raise ModelNotFound(name.text, f"{name.text} is not a model of the hub", FORM)
    try:
        return _fetch(name)
    except (HTTPError, OSError, HFValidationError) as error:
        raise _explained(name, error) from error


def _fetch(name: HubName) -> Path:
    from huggingface_hub import HfApi

    from cacheblend_cli.model.gguf_files.architectures import ARCHITECTURES

    info = HfApi().model_info(name.id, revision=name.revision)
    files = [sibling.rfilename for sibling in info.siblings or ()]
    if name.tag is None and (SINGLE in files or INDEX in files or not whole_models(files)):
        return _fetch_checkpoint(name, files)
    file = choose(name, files)
    architecture = (info.gguf or {}).get("architecture")
    if architecture not in (None, *ARCHITECTURES):
        raise UsageError(
            f"{name.id} has the architecture {architecture}, which is not read from GGUF files",
            f"known in GGUF files: {', '.join(ARCHITECTURES)}",
        )
    path = download(name.id, file, name.revision)
    if name.tag is None:
        user_cache.keep(name.record, file)
    return path


def choose(name: HubName, files: Sequence[str]) -> str:
    """Return the GGUF file of a repository that a name stands for. Raises ModelNotFound if there is none, UsageError
    for several, for a part of a model, and for a type that is not read."""
    models = whole_models(files)
    read = list(filter(is_read, models))
    shown = ", ".join(dict.fromkeys(quant_of(file) or file for file in read))
    hint = f"it has {shown}" if read else "it has no GGUF file that is read"
    if name.tag is None:
        found = defaults(read)
    else:
        named = [file for file in files if file == name.tag and file.endswith(".gguf")]
        found = named or of_quant(models, name.tag) or of_quant(filter(PART.search, files), name.tag)
    if not found:
        raise ModelNotFound(name.text, f"{name.id} has no {name.tag or 'GGUF file that is read'}", hint)
    if PART.search(found[0]):
        raise UsageError(
            f"{found[0]} is one of several parts of a model, which are not read",
            f"{hint}; or merge the parts with llama-gguf-split --merge",
        )
    file = _only(name, found)
    if not is_read(file):
        raise UsageError(f"{file} has the type {quant_of(file)}, which is not read", hint)
    return file


def _only(name: HubName, files: Sequence[str]) -> str:
    """Return the only file. Raises UsageError for several."""
    if len(files) > 1:
        shown = ", ".join(f"{name.repository}:{file}" for file in files[:4])
        raise UsageError(f"{name.text} stands for {len(files)} files", f"name one: {shown}")
    return files[0]


def _fetch_checkpoint(name: HubName, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    from cacheblend_cli.model.families import read_spec

    path = Path(snapshot_download(name.id, revision=name.revision, allow_patterns=list(SMALL_FILES)))
    read_spec(path)
    for file in [SINGLE] if SINGLE in files else weight_names(path):
        if file in files:  # at the commit of the configuration, even if the branch has moved since
            download(name.id, file, path.name)
    return path


def _is_whole(path: Path) -> bool:
    """Return whether the hub's cache has config.json and all weights: another tool may have fetched only some files."""
    names = weight_names(path)
    return bool(names) and all((path / name).is_file() for name in ("config.json", "tokenizer.json", *names))


def _explained(name: HubName, error: BaseException) -> BaseException:
    """Translate errors of the hub's library. A full disk stays an OSError."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{name.id}"
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
        failed = f"could not be fetched from {constants.ENDPOINT} ({reason})"
        what = f"model {name.text} is not a local directory, is not cached in full, and {failed}"
        hint = "give a local directory, or check the network and the hub id, and try again: what was fetched is kept"
    return ModelNotFound(name.text, what, hint)
