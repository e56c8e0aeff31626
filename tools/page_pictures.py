"""Take pictures of the server's page for the docs: python tools/page_pictures.py URL FOLDER, with
`cacheblend serve --model smollm2` over the pages of `cacheblend demo --write office` at URL."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUESTION = "Who leads the billing team?"


def main(url: str, folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from browser import Browser, Page

    for name, width, height in (("page", 1200, 780), ("page-narrow", 375, 780)):
        with (
            tempfile.TemporaryDirectory() as profile,
            Browser(Path(profile)) as browser,
            Page(url, browser, width, height) as page,
        ):
            page.until("document.querySelectorAll('#documents li').length")
            page.js("document.getElementById('k').value = 4")
            page.type(QUESTION)
            page.press("Enter")
            page.until("document.getElementById('stop').hidden && document.querySelectorAll('.footnote').length")
            page.js("document.querySelector('.compare').click()")
            page.until("document.querySelector('.comparison .small') !== null")
            if name == "page-narrow":
                page.js("document.querySelectorAll('.footnote')[1].click()")
                page.until("document.querySelectorAll('#passage-text .current').length")
            page.shot(folder / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
