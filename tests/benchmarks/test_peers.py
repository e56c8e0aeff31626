"""benchmarks/peers.py: machines are kept side by side, and llama.cpp runs where its AMX code dies."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest

PROGRAM = """
import json, os, signal, sys, time
if "plain" not in sys.argv[1:] and {dies}:
    os.kill(os.getpid(), signal.SIGILL)
now = time.time()
print(json.dumps({{"loaded": now, "first": now + 1, "last": now + 3}}))
"""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    module = importlib.import_module("peers")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "peers.json")
    return module


def measure(peers: ModuleType, machine: str, **dies: bool) -> dict[str, Any]:
    result = peers.results_of(peers.RESULTS, machine, anew=False) | {"shape": "tiny"}
    result["machines"][machine]["hardware"] = {"cores": 2, "memory_gib": 8, "torch": "2"}
    commands = {
        name.replace("_", "."): [sys.executable, "-c", PROGRAM.format(dies=value)] for name, value in dies.items()
    }
    peers.measure(commands, result, machine, 0.0, float("inf"))
    return json.loads(peers.RESULTS.read_text())["machines"]


def test_a_program_that_dies_of_its_amx_code_runs_without_it(peers: ModuleType) -> None:
    machines = measure(peers, "Xeon, AMX", llama_cpp=True, vLLM=True)
    assert {name: len(runs) for name, runs in machines["Xeon, AMX"]["runs"].items()} == {"llama.cpp": 1, "vLLM": 0}
    assert list(machines["Xeon, AMX"]["notes"]) == ["llama.cpp"]
    page = peers.RESULTS.with_suffix(".md").read_text()
    assert "| llama.cpp * | " in page
    assert "use_extra_bufts=False" in page


def test_another_machine_is_kept_beside_the_first(peers: ModuleType) -> None:
    measure(peers, "one", vLLM=False)
    machines = measure(peers, "two", vLLM=False)
    assert [len(here["runs"]["vLLM"]) for here in machines.values()] == [1, 1]
    page = peers.RESULTS.with_suffix(".md").read_text()
    assert page.index("## one") < page.index("## two")
    assert list(peers.results_of(peers.RESULTS, "one", anew=True)["machines"]) == ["two", "one"]
    assert peers.results_of(peers.RESULTS, "one", anew=True)["machines"]["one"]["runs"] == {}


SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Fake(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/large": bytes(b"x" * (64 << 20))
        self.reply(json.dumps({"data": [{"id": "tiny"}]}))
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["prompt"] == [1, 2, 3] and asked["max_tokens"] == 100, asked
        self.reply("".join(f"data: {json.dumps({'choices': [{'token_ids': [7]}]})}\\n\\n" for _ in range(100)) + "data: [DONE]\\n\\n")
    def reply(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *about): pass
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Fake).serve_forever()
"""


def test_a_server_that_runs_is_asked_and_its_memory_is_counted(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable} -u\n{SERVER}")
    python.chmod(0o700)
    (tmp_path / "ids.json").write_text("[1, 2, 3]")
    with peers.VllmServer(peers.Models(tmp_path), str(python)) as server:
        found = peers.run(server.command("alone"), server=server)
        assert server.cpu_s() > 0
        assert found["peak_mib"] > server.peak_mib() > 1
        small = server.peak_mib()
        urlopen(f"{server.url}/large").close()
        assert server.peak_mib() > small + 32
        server.forget_peaks()
        assert server.peak_mib() < small + 32
        [pid] = server._stats()
        assert b"OMP_NUM_THREADS" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert 0 < found["first_s"] <= found["process_first_s"] <= found["process_last_s"]
    assert server.cpu_s() == 0


SERVE = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
class Fake(BaseHTTPRequestHandler):
    def do_GET(self): self.begin()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["stream"] and asked["chunks"] == ["a", "b"], asked
        self.begin()
        for piece in ({"choices": [{}]}, {"choices": [{}], "blend": {"notes": [], "timing": {"ttft_s": 0.001}}}, {"choices": [], "usage": {"completion_tokens": 100}}):
            self.wfile.write(f"data: {json.dumps(piece)}\\n\\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\\n\\n")
    def begin(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *about): pass
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Fake).serve_forever()
"""


def test_a_blended_answer_is_timed_by_its_server_and_its_end(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("peer_vllm")
    monkeypatch.setattr(module, "CLI", [sys.executable, "-c", SERVE])
    models = SimpleNamespace(machine=lambda precision: [], chunks=lambda precision: "a,b")
    found = module.blended("http://unused", models, "unused")
    assert found["first"] - found["loaded"] == pytest.approx(0.001, abs=1e-4)
    assert found["loaded"] < found["last"]
