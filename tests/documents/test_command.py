"""`python -m cacheblend_documents`, and what an import of the package costs."""

from __future__ import annotations

import os
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


CONVERTERS = """
import sys
from cacheblend_documents import Converted, Mark, NotConverted

def noisy(data):
    print("on stdout", flush=True)
    return Converted("read" + sys.stdin.read())

def refuses(data):
    raise NotConverted("has no words")

def kind(data):
    return Converted("x", "html")

def string(data):
    return "x"

def late(data):
    return Converted("one two", marks=(Mark(4, "part 2"),), is_split=True)

def unsplit(data):
    return Converted("one two", is_split=True)

def backwards(data):
    return Converted("one two", marks=(Mark(4), Mark(0)))
"""


def test_a_wrong_converter_of_another_distribution_refuses_its_files(tmp_path: Path) -> None:
    about = tmp_path / "others-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    names = "kind", "string", "late", "unsplit", "backwards"
    points = "".join(f"{name} = others:{name}\n" for name in names)
    (about / "entry_points.txt").write_text(
        f"[cacheblend.converters]\nnoisy = others:noisy\nodt = others:refuses\n{points}"
    )
    (tmp_path / "others.py").write_text(CONVERTERS)
    given = "a.noisy", "a.odt", *(f"a.{name}" for name in names)
    for name in given:
        (tmp_path / name).write_text("x")
    done = subprocess.run(
        [sys.executable, "-m", "cacheblend_documents", *given],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.stdout, done.returncode) == ("read\n", 1), done.stderr
    refused, *wrong = done.stderr.splitlines()
    assert refused == "a.odt: has no words"
    assert [line.partition(": its converter ")[0] for line in wrong] == [f"a.{name}" for name in names]
