"""A folder as people have it: files of twenty kinds, names with spaces, newlines and emoji, a long PDF, a large text, a
gitignored build, links out and in circles.

Run by itself it makes one of full size: `python tests/support/mixed_folder.py FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import files

WORDS = "who leads billing in Bergen and which desk has the lead of the harbor team at home".split()


def mixed_folder(folder: Path, *, pages: int = 3, paragraphs: int = 4) -> Path:
    """pages: of the PDF. paragraphs: of the long text."""

    def prose(number: int) -> str:
        return f"Paragraph {number} says " + " ".join(WORDS[(number + i) % len(WORDS)] for i in range(14)) + "."

    def page(number: int) -> str:
        return "\n".join((f"Page {number} of the report.", *(prose(100 * number + i) for i in range(4))))

    kinds: dict[str, bytes | str] = {
        "notes.md": "# Notes\n\nMara leads billing.\n\n## Travel\n\nAda works in Bergen.\n",
        "plain.txt": "\n\n".join(map(prose, range(paragraphs))) + "\n",
        "guide.rst": "Guide\n=====\n\nHow the harbor team works.\n",
        "page.html": "<nav>Menu</nav><main><h1>Page</h1><p>The desk is at home.</p></main>",
        "people.csv": "name,city\nMara,Bergen\nAda,Oslo\n",
        "rates.tsv": "city\trate\nBergen\t90\n",
        "facts.json": json.dumps([{"id": "f1", "title": "Fact", "text": "Billing is in Bergen."}]),
        "faq.jsonl": '{"id": 1, "title": "Lead", "text": "Who leads?"}\n{"id": 2, "text": "Ada leads."}\n',
        "src/pool.py": "class Pool:\n    def take(self):\n        return 1\n\n\ndef free(x):\n    return x\n",
        "src/main.go": "package main\n\nfunc main() {\n\tprintln(1)\n}\n",
        "config.yaml": "team: harbor\nlead: Mara\n",
        "study.ipynb": files.notebook(),
        "mail.eml": files.mail(),
        "report.pdf": files.pdf(list(map(page, range(1, pages + 1))), "Report"),
        "scan.pdf": files.pdf(["", ""]),
        "letter.docx": files.docx(),
        "plans.pptx": files.pptx(),
        "people.xlsx": files.xlsx(),
        "book.epub": files.epub(["<h1>One</h1><p>Of the harbor.</p>"]),
        "README": "Read me first.\n",
        "a name with\nnewline \U0001f600.md": "# Odd\n\nA name of a file.\n",
        "picture.png": b"\x89PNG\r\n\0",
        "other.png": b"\x89PNG\r\n\0",
        "data.bin": b"\0\1\2",
        "broken.txt": b"caf\xe9",
        "build/out.md": "never seen\n",
        "deep/er/.gitignore": "*.log\n",
        "deep/er/trace.log": "never seen\n",
        "deep/er/end.md": "# End\n\nOf all.\n",
        ".gitignore": "build/\n",
        ".secret.md": "never seen\n",
    }
    for name, data in kinds.items():
        files.write(folder / name, data)
    files.write(folder.parent / "outside/far.md", "# Far\n\nFrom elsewhere.\n")
    (folder / "outside").symlink_to(folder.parent / "outside")
    (folder / "deep/up").symlink_to(folder)
    (folder / "linked.md").symlink_to(folder.parent / "outside/far.md")
    (folder / "nowhere.md").symlink_to(folder / "gone.md")
    return folder


if __name__ == "__main__":
    mixed_folder(Path(sys.argv[1]), pages=200, paragraphs=60_000)
