"""Chunks as plain files, out and in. Not imported with `cacheblend_store`: few commands need it."""

from cacheblend_store.archive.exporting import ExportReport, export_chunks
from cacheblend_store.archive.files import ArchiveOptions
from cacheblend_store.archive.importing import ImportedChunk, ImportReport, import_chunks

__all__ = [
    "ArchiveOptions",
    "ExportReport",
    "ImportReport",
    "ImportedChunk",
    "export_chunks",
    "import_chunks",
]
