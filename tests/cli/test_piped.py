"""Text that is piped beside a question: read if it is for this command, and left alone if it belongs to another."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cacheblend_cli.cli import piped
from cacheblend_cli.cli.piped import piped_text
from cacheblend_cli.errors import UsageError

Cli = Callable[..., Any]
TEXT = "alpha keeps the harbor.\n"
READ = "import sys; from cacheblend_cli.cli.piped import piped_text; print(repr(piped_text(print, print)))"

READ_AT_ONCE = """
from cacheblend_cli.cli import piped

def say(message):
    print(message, flush=True)

piped.WAIT_S = 0.0
print(repr(piped.piped_text(say, say)))
"""


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[str]]]:
    """Make a descriptor stdin, and return the messages about it, the text last."""
    opened: list[int] = []

    def read(descriptor: int) -> list[str]:
        opened.append(descriptor)
        stream = io.TextIOWrapper(os.fdopen(descriptor, "rb", closefd=False), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stream)
        said: list[str] = []
        text = piped_text(said.append, said.append)
        return [*said, *([] if text is None else [text])]

    monkeypatch.setattr(piped, "WAIT_S", 0.0)
    yield read
    for descriptor in opened:
        with suppress(OSError):
            os.close(descriptor)


def pipe_with(data: bytes) -> tuple[int, int]:
    end, start = os.pipe()
    os.write(start, data)
    return end, start


def test_a_pipe_is_read_to_its_end(stdin: Callable[[int], list[str]]) -> None:
    end, start = pipe_with(TEXT.encode())
    os.close(start)
    assert stdin(end) == [TEXT]
    ours, theirs = socket.socketpair()
    theirs.sendall(TEXT.encode())
    theirs.close()
    assert stdin(ours.detach()) == [TEXT]


@pytest.mark.parametrize("data", [b"", b" \n"])
def test_a_pipe_without_text_is_no_document(stdin: Callable[[int], list[str]], data: bytes) -> None:
    end, start = pipe_with(data)
    os.close(start)
    assert stdin(end) == []


def test_a_pipe_that_nobody_writes_to_is_given_up(stdin: Callable[[int], list[str]]) -> None:
    end, start = os.pipe()
    [said] = stdin(end)
    os.close(start)
    assert "silent" in said


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_slow_command_of_the_pipeline_is_waited_for() -> None:
    go, told = os.pipe()
    end, start = os.pipe()
    slow = f"import os; os.read({go}, 1); os.write(1, {TEXT.encode()!r})"
    writer = subprocess.Popen([sys.executable, "-c", slow], stdout=start, pass_fds=(go,))
    reader = subprocess.Popen([sys.executable, "-c", READ_AT_ONCE], stdin=end, stdout=subprocess.PIPE, text=True)
    for descriptor in (go, end, start):
        os.close(descriptor)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "waiting for the text on stdin\n"
    os.write(told, b"1")
    assert reader.stdout.read() == f"{TEXT!r}\n"
    assert (writer.wait(60), reader.wait(60)) == (0, 0)
    os.close(told)


def test_a_file_is_read_unless_it_is_at_its_end(stdin: Callable[[int], list[str]], tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text(TEXT)
    assert stdin(os.open(tmp_path / "notes.md", os.O_RDONLY)) == [TEXT]
    at_end = os.open(tmp_path / "notes.md", os.O_RDONLY)
    os.lseek(at_end, 0, os.SEEK_END)
    assert stdin(at_end) == []
    assert stdin(os.open(os.devnull, os.O_RDONLY)) == []


def test_no_stdin_is_no_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert piped_text(print, print) is None


def test_what_is_no_text_or_too_much_is_refused(
    stdin: Callable[[int], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for data, match in ((b"%PDF \xff\xfe", "UTF-8"), (b"word " * 9, "too much")):
        monkeypatch.setattr(piped, "MAX_BYTES", 20)
        end, start = pipe_with(data)
        os.close(start)
        with pytest.raises(UsageError, match=match):
            stdin(end)


def shell(script: str, tmp_path: Path) -> list[str]:
    """Run a script in which `$READ` shows what the command would read. Returns its lines."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(map(str, (root, root / "store", root / "kernels")))
    env = {**os.environ, "PYTHONPATH": paths, "READ": READ, "PYTHON": sys.executable}
    (tmp_path / "q").write_text("one?\ntwo?\n")
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_stdin_of_a_shell_loop_is_left_alone(tmp_path: Path) -> None:
    loop = 'while read line; do echo "$line"; "$PYTHON" -c "$READ"; done'
    for script in (f"cat q | {loop}", f"{loop} < q"):
        lines = shell(script, tmp_path)
        assert [line for line in lines if line.endswith("?")] == ["one?", "two?"]
        assert lines.count("None") == 2
        assert any("bash reads it, too" in line for line in lines)


@pytest.mark.parametrize(
    "how", ['cat q | "$PYTHON" -c "$READ"', '"$PYTHON" -c "$READ" < q', 'cat q | timeout 50 "$PYTHON" -c "$READ"']
)
def test_what_is_piped_to_the_command_is_read(tmp_path: Path, how: str) -> None:
    assert shell(f"{how}; true", tmp_path) == ["'one?\\ntwo?\\n'"]


def test_an_answer_from_stdin_alone(cli: Cli, stored: list[str]) -> None:
    asked = ("ask", "who keeps the harbor?", "--max-tokens", "3")
    result = cli(*asked, stdin=TEXT)
    assert result.code == 0, result.err
    assert f"answering from stdin ({len(TEXT)} characters)" in result.err
    assert [line for line in result.err.splitlines() if line.startswith("source: ")] == ["source: stdin, line 1"]
    [again] = cli(*asked, "--json", stdin=TEXT).records
    assert [(c["source"], c["status"]) for c in again["chunks"]] == [("stdin", "exact")]
    assert sorted(cli("chunks", "ls", "-q").out.split()) == sorted(stored), (
        "it is not listed, nor found by other questions"
    )
    assert cli(*asked, "-q", stdin=TEXT).err == ""


def test_a_piped_page_that_is_stored_is_stdin_too(cli: Cli, stored: list[str], docs: Path) -> None:
    [answer] = cli("ask", "who?", "--max-tokens", "3", "--json", stdin=(docs / "alpha.md").read_text()).records
    assert {c["source"] for c in answer["chunks"]} == {"stdin"}
    [plan] = cli("ask", "who?", "--json", "--dry-run", stdin=(docs / "alpha.md").read_text()).records
    assert {c["source"] for c in plan["chunks"]} == {"stdin"}


@pytest.mark.parametrize("also", [("-k", "2"), ("--all",), ("--source", "docs/*")])
def test_stored_documents_are_searched_too_if_that_is_asked(cli: Cli, stored: list[str], also: tuple[str, ...]) -> None:
    [answer] = cli("ask", "alpha beta?", "--max-tokens", "3", "--json", *also, stdin=TEXT).records
    sources = [c["source"] for c in answer["chunks"]]
    assert sources[0] == "stdin"
    assert "docs/alpha.md" in sources[1:]


def test_stdin_that_has_another_use_is_no_document(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    for flags, text in ((("who?", "--chunks", "-"), stored[0]), (("-", "--chunks", stored[0]), "who?")):
        [answer] = cli("ask", *flags, "--max-tokens", "2", "--json", stdin=text).records
        assert [c["id"] for c in answer["chunks"]] == [stored[0]]
    (tmp_path / "q.jsonl").write_text('{"question": "alpha?"}\n')
    [answer] = cli("ask", "--batch", "q.jsonl", "--max-tokens", "2", stdin=TEXT).records
    assert "stdin" not in {c["source"] for c in answer["chunks"]}


def test_piped_text_needs_no_store(cli: Cli) -> None:
    result = cli("ask", "who keeps the harbor?", "--max-tokens", "2", stdin=TEXT)
    assert result.code == 0, result.err


def test_too_long_a_text_says_to_store_it(cli: Cli, stored: list[str]) -> None:
    for flags in ((), ("--dry-run",)):
        result = cli("ask", "who?", *flags, stdin="word and " * 4000)
        assert result.code == 2
        assert "cacheblend precompute FILE" in result.err
