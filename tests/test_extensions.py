"""Extensions of other distributions: installed by pip, found by name, imported only when they are used."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fake_vllm
import httpx
import pytest
import torch
from cacheblend_store.tier import open_tier
from cacheblend_vllm.handover import HandOverSource
from checkpoints import write_checkpoint
from command_line import CommandResult, process
from fake_vllm import FakeServer
from transformers import AutoModelForCausalLM

from cacheblend_cli import extensions
from cacheblend_cli.errors import UsageError

ROOT = Path(__file__).parents[1]
PACKAGES = ("", "documents", "store", "kernels")
BROKEN = """
[project.entry-points."cacheblend.decoders"]
broken = "no_such_module:Decoder"
twice = "our_extensions:ThisProcess"
"""


def install(source: Path, target: Path) -> None:
    """Install a distribution into a folder, from a copy: a build leaves files beside the source."""
    copy = shutil.copytree(source, target / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps", "--no-index")
    subprocess.run([*pip, "--no-build-isolation", "--target", target, copy], check=True, timeout=100)


def example(page: str) -> dict[str, str]:
    """Return the last block of code of each language on a page."""
    return dict(re.findall(r"```(\w+)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the example of docs/extending.md installed, and two distributions with broken extensions."""
    folder, target = tmp_path_factory.mktemp("extensions"), tmp_path_factory.mktemp("packages")
    code = example("docs/extending.md")
    (folder / "pyproject.toml").write_text(code["toml"] + BROKEN)
    (folder / "our_extensions.py").write_text(code["python"])
    install(folder, target)
    other = target / "other_extensions-2.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other-extensions\nVersion: 2.0\n")
    (other / "entry_points.txt").write_text("[cacheblend.decoders]\ntwice = no_such_module:Decoder\n")
    return target


IN_ONE_PROCESS = """
import contextlib, io, json
sys.path.append(sys.argv[1])
for command in json.loads(sys.argv[2]):
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        code = run(command.split())
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def commands(packages: Path, *lines: str) -> list[CommandResult]:
    """Run commands in one process that has the extensions."""
    done = process(str(packages), json.dumps(lines), code=IN_ONE_PROCESS)
    assert done.code == 0, done.err
    return [CommandResult(*record) for record in done.records]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a document."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "store"))
    (tmp_path / "a.md").write_text("# Billing\n\nMara leads billing, and she works in Bergen near the harbor.\n")
    return tmp_path


def test_a_selector_is_found_by_name(packages: Path, folder: Path) -> None:
    ask = "ask billing? --max-tokens 4 --json --selector"
    stored, done, wrong = commands(packages, "precompute a.md -q", f"{ask} first:1+edges", f"{ask} edge")
    assert (stored.code, done.code) == (0, 0), stored.err + done.err
    assert done.records[-1]["selector"] == "first:1+edges"
    assert (wrong.code, "none, edges" in wrong.err) == (2, True), wrong.err


def test_a_collector_puts_kv_to_the_tier(packages: Path, folder: Path) -> None:
    url = (folder / "tier").as_uri()
    store = f"precompute a.md --tier {url} --workers 2 --collector"
    done, listed, *wrong = commands(
        packages, f"{store} here:x", "chunks ls --json", f"{store} nowhere", f"{store} there:x"
    )
    assert done.code == 0, done.err
    [chunk] = listed.records
    assert chunk["bytes"] == 0
    assert any(chunk["id"] in found.name for found in open_tier(url).chunks())
    for refused in wrong:
        assert (refused.code, "installed: here" in refused.err) == (2, True), refused.err


def test_an_object_store_holds_a_tier(packages: Path, folder: Path) -> None:
    url = f"sqlite://{folder / 'kv.db'}"
    stored, pushed, pulled, listed, shared, unknown = commands(
        packages,
        "precompute a.md -q",
        f"chunks push {url}",
        f"chunks pull {url} --store other",
        "chunks ls --json --store other",
        f"precompute a.md --store third --tier {url}",
        f"chunks push nosql://{folder / 'kv.db'}",
    )
    assert (stored.code, pushed.code, pulled.code) == (0, 0, 0), stored.err + pushed.err + pulled.err
    [chunk] = listed.records
    assert chunk["bytes"] > 0
    assert "1 of them from the tier" in shared.err
    assert (unknown.code, "unknown tier 'nosql://" in unknown.err) == (2, True), unknown.err


SUBTITLES = (
    "1\n00:00:01,000 --> 00:00:04,000\nThe ferry leaves\nat nine.\n\n2\n00:00:05,000 --> 00:00:06,000\nBe there."
)


@pytest.fixture
def converters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the converter of documents/README.md installed, which the processes of this test import from."""
    code, target = example("documents/README.md"), tmp_path / "packages"
    source = tmp_path / "subtitles"
    source.mkdir()
    (source / "pyproject.toml").write_text(code["toml"])
    (source / "our_subtitles.py").write_text(code["python"])
    install(source, target)
    monkeypatch.setenv("PYTHONPATH", str(target))
    return target


def test_a_converter_is_found_by_suffix(converters: Path, folder: Path) -> None:
    docs = folder / "docs"
    docs.mkdir()
    (docs / "a.SRT").write_text(SUBTITLES, newline="\r\n")
    (docs / "b.srt").write_text("1\n")
    (docs / "c.unknown").write_text("not read")
    shutil.move(folder / "a.md", docs)
    read = subprocess.run(
        [sys.executable, "-m", "cacheblend_documents", "docs/a.SRT", "docs/b.srt"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert read.stdout == "The ferry leaves at nine.\nBe there.\n"
    assert (read.returncode, "b.srt: no subtitles" in read.stderr) == (1, True), read.stderr
    stored, listed = commands(converters, "precompute docs -q", "chunks ls --json")
    assert (stored.code, "b.srt: no subtitles" in stored.err) == (0, True), stored.err
    assert sorted({record["source"] for record in listed.records}) == ["docs/a.SRT", "docs/a.md"]
    other = converters / "other_subtitles-2.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other-subtitles\nVersion: 2.0\n")
    (other / "entry_points.txt").write_text(
        "[cacheblend.converters]\nsrt = nothing:convert\nmd = nothing:convert\nsub = nothing:convert\n"
    )
    (docs / "d.sub").write_text("x")
    twice, broken = commands(converters, "precompute docs/a.SRT docs/a.md", "precompute docs/d.sub")
    assert "of other-subtitles 2.0, cannot be imported: ModuleNotFoundError" in broken.err
    assert "several distributions" in twice.err
    assert "other-subtitles 2.0" in twice.err
    assert "a.md was not" not in twice.err, "a suffix of the package's own stays its own"


def test_a_broken_extension_ends_only_what_uses_it(packages: Path, folder: Path) -> None:
    broken, twice, other = commands(
        packages, "serve --decoder broken:x --port 0", "serve --decoder twice:x", "search Mara"
    )
    assert broken.code == 2
    assert "broken of our-extensions 1.0 cannot be imported: ModuleNotFoundError" in broken.err
    assert (twice.code, "other-extensions 2.0" in twice.err) == (2, True), twice.err
    assert other.code == 3  # there is no store


def test_a_plain_ask_looks_for_no_extension(folder: Path) -> None:
    code = """
from cacheblend_cli import extensions
from cacheblend_documents import formats
extensions.installed = formats._installed = None  # calling it fails
sys.exit(run(["precompute", "a.md", "-q"]) or run(["ask", "billing?", "--max-tokens", "2", "--selector", "hkvd"]))
"""
    done = process(code=code)
    assert done.code == 0, done.err


def test_errors_name_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "installed", lambda kind: ())
    with pytest.raises(UsageError, match="no decoder 'vllm'") as found:
        extensions.load("decoder", "vllm")
    assert "installed: none" in str(found.value.hint)


def test_the_vllm_connector_is_a_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("httpx2")
    fake_vllm.install(monkeypatch)
    install(ROOT / "connectors/vllm", tmp_path / "packages")
    write_checkpoint(tmp_path / "tiny", "qwen2", max_position_embeddings=1024)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.float32).eval()
    paths = [*(ROOT / part for part in PACKAGES), tmp_path / "packages"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    with fake_vllm.serving(FakeServer(loaded, HandOverSource(str(tmp_path / "shm"), None))) as fake:
        flags = ("--decoder", f"vllm:{fake.url},{tmp_path / 'shm'}", "--port", "0", "--model", str(tmp_path / "tiny"))
        program = "import sys; from cacheblend_cli.cli.main import run; sys.exit(run(sys.argv[1:]))"
        serve = subprocess.Popen(
            [sys.executable, "-c", program, "serve", *flags, "--store", str(tmp_path / "store")],
            env=environment, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert serve.stderr is not None
            lines = []
            for line in serve.stderr:
                lines.append(line)
                if answers := re.search(r"answers at (\S+);", line):
                    break
            else:
                pytest.fail("".join(lines))
            body = {"messages": [{"role": "user", "content": "who?"}], "max_tokens": 4}
            reply = httpx.post(f"{answers[1]}/chat/completions", json=body, timeout=60)
            assert reply.status_code == 200, reply.text
            assert len(fake.requests) == 1
            assert fake.loaded == [json.loads(reply.text)["usage"]["prompt_tokens"] - 1]
        finally:
            serve.send_signal(signal.SIGINT)
            serve.wait(30)
