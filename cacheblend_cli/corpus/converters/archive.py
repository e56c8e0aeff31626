"""ZIP archives: their unpacked size is limited."""

from __future__ import annotations

import io
import zipfile

from cacheblend_cli.corpus.converters.converter import NoDocument

_MOST = 512 << 20  # maximum unpacked bytes


def opened(data: bytes, what: str) -> zipfile.ZipFile:
    """Open the archive. Raises NoDocument if it is not a ZIP archive or is too large unpacked."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise NoDocument(f"not {what}, or with a password", "damaged or locked") from error
    if sum(entry.file_size for entry in archive.infolist()) > _MOST:
        raise NoDocument(f"unpacks to more than {_MOST >> 20} MiB", "too large unpacked")
    return archive
