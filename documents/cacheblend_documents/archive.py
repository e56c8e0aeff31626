"""ZIP archives: their unpacked size is limited."""

from __future__ import annotations

import io
import zipfile

from cacheblend_documents.converter import COMPOUND, OLD_OFFICE, NoDocument

_MOST = 512 << 20  # maximum unpacked bytes
_LOCKED = "EncryptedPackage".encode("utf-16-le")


def opened(data: bytes, what: str) -> zipfile.ZipFile:
    """Open the archive. Raises NoDocument if it is not a ZIP archive, has a password or is too large unpacked."""
    if data.startswith(COMPOUND):
        if _LOCKED in data:
            raise NoDocument(f"{what} with a password", "with a password")
        raise NoDocument(OLD_OFFICE, "damaged or locked")
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise NoDocument(f"not {what}", "damaged or locked") from error
    if any(entry.flag_bits & 1 for entry in archive.infolist()):
        raise NoDocument(f"{what} with a password", "with a password")
    if sum(entry.file_size for entry in archive.infolist()) > _MOST:
        raise NoDocument(f"unpacks to more than {_MOST >> 20} MiB", "too large unpacked")
    return archive
