"""Download of one file into the hub's cache: continued where it stopped, and compared with the hub's SHA-256.

huggingface_hub starts an interrupted file again (since 1.13) and compares only its size.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

from cacheblend_cli.errors import ModelNotFound, UsageError

SHA256 = re.compile(r"[0-9a-f]{64}")


def download(repository: str, file: str, revision: str | None) -> Path:
    """Return the path of a file in the hub's cache, fetched if it is missing. Raises UsageError if the disk has too
    little space, ModelNotFound if what was fetched is damaged, and huggingface_hub's errors."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import WeakFileLock

    url = hf_hub_url(repository, file, revision=revision)
    remote = get_hf_file_metadata(url)
    digest, size = remote.etag or "", remote.size or 0
    cache, name = Path(constants.HF_HUB_CACHE), repo_folder_name(repo_id=repository, repo_type="model")
    blob = cache / name / "blobs" / digest
    is_cached = blob.exists() or (cache / name / "snapshots" / str(remote.commit_hash) / file).exists()
    if not is_cached and SHA256.fullmatch(digest) and 0 < size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
        lock = cache / ".locks" / name / f"{digest}.lock"  # huggingface_hub's lock of this blob
        for folder in (blob.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if not blob.exists():
                _fetch(url, blob, size, file)
    return Path(hf_hub_download(repository, file, revision=revision))  # links the blob


def _fetch(url: str, blob: Path, size: int, file: str) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    part = blob.with_name(f"{blob.name}.part")
    with part.open("ab") as stream:
        if stream.tell() > size:
            stream.truncate(0)
            stream.seek(0)
        _check_space(blob.parent, size - stream.tell(), file)
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}  # compressed files have no byte ranges
        http_get(url, stream, resume_size=stream.tell(), headers=headers, expected_size=size, displayed_filename=file)
    with part.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    if digest != blob.name:
        part.unlink()
        raise ModelNotFound(
            file,
            f"{file} was damaged on its way: its SHA-256 is {digest[:12]}..., the hub states {blob.name[:12]}...",
            "what was fetched is removed; try again",
        )
    part.replace(blob)


def _check_space(folder: Path, missing: int, file: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < missing:
        raise UsageError(
            f"{file} needs {missing / 2**30:.2f} GiB more, and {folder} has {free / 2**30:.2f} GiB free",
            "free some space, or set HF_HOME to a folder on another disk",
        )
