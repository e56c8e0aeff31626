"""Scanned PDFs, and a program in place of ocrmypdf: it writes a prepared PDF and notes how it was called."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import files

_SCRIPT = """#!{python}
import json, os, pathlib, sys
here = pathlib.Path({here!r})
with (here / "calls").open("a") as calls:
    print(json.dumps({{"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(),
                       "mode": os.stat(".").st_mode & 0o777}}), file=calls)
{body}
pathlib.Path(sys.argv[-1]).write_bytes((here / "recognised.pdf").read_bytes())
"""


_TEXT = "text in the place of an image " * 2
_IMAGE = b"q 99 0 0 99 9 9 cm BI /W 1 /H 1 /BPC 8 /CS /G ID \x80 EI Q"


def scanned_pdf(pages: list[str]) -> bytes:
    """Return a PDF with one page per text; "" is a page that shows only an image."""
    data = files.pdf([text or _TEXT for text in pages])
    start = data.find(_TEXT.encode())
    while start >= 0:
        start, end = data.rindex(b"BT", 0, start), data.index(b"ET", start) + 2
        data = data[:start] + _IMAGE.ljust(end - start) + data[end:]
        start = data.find(_TEXT.encode())
    return data


class FakeOcr:
    """The program, in a folder of its own to put on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def write(self, recognised: bytes, body: str = "") -> None:
        """recognised: the PDF that it writes. body: Python code to run before."""
        (self.folder / "recognised.pdf").write_bytes(recognised)
        program = self.folder / "ocrmypdf"
        program.write_text(_SCRIPT.format(python=sys.executable, here=str(self.folder), body=body))
        program.chmod(0o755)

    @property
    def calls(self) -> list[dict[str, Any]]:
        noted = self.folder / "calls"
        return [json.loads(line) for line in noted.read_text().splitlines()] if noted.exists() else []
