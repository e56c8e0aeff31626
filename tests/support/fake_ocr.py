"""A program in place of ocrmypdf: it writes a prepared PDF and notes how it was called."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_SCRIPT = """#!{python}
import json, os, pathlib, sys
here = pathlib.Path({here!r})
with (here / "calls").open("a") as calls:
    print(json.dumps({{"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(),
                       "mode": os.stat(".").st_mode & 0o777}}), file=calls)
{body}
pathlib.Path(sys.argv[-1]).write_bytes((here / "recognised.pdf").read_bytes())
"""


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
