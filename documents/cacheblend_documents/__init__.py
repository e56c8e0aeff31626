"""Text of documents: PDF, Word, slides, sheets, web pages, mail, books, notebooks and code.

    converted = cacheblend_documents.convert("report.pdf", data)

`python -m cacheblend_documents FILE` prints it. README.md says what is kept, reported and not read of each format.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cacheblend_documents.conversion import Limits as Limits
    from cacheblend_documents.conversion import convert as convert
    from cacheblend_documents.conversion import converter_process as converter_process
    from cacheblend_documents.converted import Converted as Converted
    from cacheblend_documents.converted import Mark as Mark
    from cacheblend_documents.converted import NotConverted as NotConverted
    from cacheblend_documents.formats import readable_suffixes as readable_suffixes
    from cacheblend_documents.ocr import OcrError as OcrError

_HOMES = {
    **dict.fromkeys(("Limits", "convert", "converter_process"), "conversion"),
    **dict.fromkeys(("Converted", "Mark", "NotConverted"), "converted"),
    "readable_suffixes": "formats",
    "OcrError": "ocr",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
