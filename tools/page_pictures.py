"""Take pictures of the server's page for the docs: python tools/page_pictures.py URL FOLDER, with a server at the URL."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUESTION = "Which team does Solveig Bergmann lead?"


def main(url: str, folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from browser import Page

    for name, width, height in (("page", 960, 1150), ("page-narrow", 375, 900)):
        with tempfile.TemporaryDirectory() as profile, Page(url, Path(profile), width, height) as page:
            page.type(QUESTION)
            page.press("Enter")
            page.until(
                "document.querySelectorAll('#sources li').length > 0 && !document.getElementById('verify').disabled"
            )
            page.js("document.querySelectorAll('details').forEach((d, i) => { d.open = i < 2; })")
            page.shot(folder / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
