"""`python -m cacheblend_documents`, and what an import of the package costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import files

LIGHT = """
import sys, cacheblend_documents
assert cacheblend_documents.convert("a.md", b"# A").text == "# A\\n"
heavy = "selectolax", "pypdfium2", "defusedxml", "python_calamine", "torch", "cacheblend_cli", "cacheblend_store"
print([name for name in heavy if name in sys.modules])
"""


def test_text_goes_to_stdout_and_what_is_left_out_to_stderr(tmp_path: Path) -> None:
    files.write(tmp_path / "a.docx", files.docx())
    files.write(tmp_path / "b.html", b"<p>caf\xe9")
    files.write(tmp_path / "c.png", b"\0")
    command = [sys.executable, "-m", "cacheblend_documents", "-", "a.docx", "b.html", "c.png", "missing"]
    done = subprocess.run(command, cwd=tmp_path, input=b"# Piped\n", capture_output=True, timeout=100)
    assert done.returncode == 1
    assert done.stdout.decode().startswith("# Piped\n# Travel\n")
    assert done.stdout.decode().endswith("caf\xe9\n")
    [left_out, refused, missing] = done.stderr.decode().splitlines()
    assert left_out.startswith("b.html: left out: its encoding is not declared")
    assert refused == "c.png: images have no text"
    assert missing.startswith("missing: ")


def test_plain_text_is_converted_without_a_parser() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=100)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
