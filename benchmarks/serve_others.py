"""Baselines of `serve.py`: transformers and llama.cpp's server, on the same checkpoint and prompts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch

ROOT = Path(__file__).parent.parent
SLOTS = 4
CONTINUOUS = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
checkpoint, prompts, tokens, pages, threads = json.load(sys.stdin)
torch.set_num_threads(threads)
config = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=-1)
model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa").eval()
batching = ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=512, use_cuda_graph=False)
started = time.perf_counter()
outputs = model.generate_batch(inputs=prompts, generation_config=config, continuous_batching_config=batching, warmup=False)
took = time.perf_counter() - started
assert sum(len(o.generated_tokens) == tokens for o in outputs.values()) == len(prompts), "answers are missing"
print(json.dumps(took))
"""
LLAMA_SERVER = """
import json, sys
import xllamacpp
model, context, slots, threads = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.verbosity = model, context, slots, 0
params.kv_unified, params.fit_params, params.ui, params.port = False, False, False, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""

Prompts = Sequence[Sequence[int]]


def transformers(checkpoint: Path, prompts: Prompts, tokens: int, seconds: float) -> list[dict[str, Any]]:
    """Run generate, one prompt after another for a quarter of the seconds; then its continuous batching."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    config = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=-1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    started, count = time.perf_counter(), 0
    while count < len(prompts) and (not count or time.perf_counter() - started < seconds / 4):
        ids = torch.tensor([prompts[count]])
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        count += 1
    rate = count / (time.perf_counter() - started)
    found = [{"case": "one by one", "requests": count, "requests_per_s": rate}]
    del model
    several = [list(p) for p in prompts[: max(2, min(len(prompts), int(seconds / 2 * rate)))]]
    return [*found, continuous(checkpoint, several, tokens, max(60.0, seconds))]


def continuous(checkpoint: Path, prompts: list[list[int]], tokens: int, most_s: float) -> dict[str, Any]:
    """Run transformers' continuous batching in a process of its own, since a caller waits forever if its thread
    fails."""
    pages = sum(-(-(len(p) + tokens) // 256) for p in prompts)
    given = json.dumps([str(checkpoint), prompts, tokens, pages + 1, torch.get_num_threads()])
    try:
        done = subprocess.run(
            [sys.executable, "-c", CONTINUOUS], input=given, capture_output=True, text=True, timeout=most_s, check=True
        )
        took = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"case": "continuous batching", "error": f"no answer to {len(prompts)} prompts within {most_s:.0f} s"}
    except subprocess.CalledProcessError as error:
        return {"case": "continuous batching", "error": error.stderr.strip().splitlines()[-1][:200]}
    return {"case": "continuous batching", "requests": len(prompts), "requests_per_s": len(prompts) / took}


def llama_cpp(python: str, checkpoint: Path, prompts: Prompts, tokens: int, seconds: float) -> list[dict[str, Any]]:
    """Run llama.cpp's server with four slots, each with room for a prompt; weights in float32 as ours, KV in
    float16."""
    file = checkpoint.parent / "model.gguf"
    write_gguf(checkpoint, file)
    context = SLOTS * (-(-(max(map(len, prompts)) + tokens + 1) // 256) * 256)
    given = json.dumps([str(file), context, SLOTS, torch.get_num_threads()])
    command = [python, "-c", LLAMA_SERVER, given]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        try:
            if not address:
                return [{"error": f"the server ended at once: {python}"}]
            alone = completed(address, prompts[:1], tokens, 1)
            count = max(SLOTS, min(len(prompts) - 1, int((seconds - alone) / alone)))
            took = completed(address, prompts[1 : count + 1], tokens, SLOTS)
        finally:
            server.kill()
    return [{"case": f"{SLOTS} slots", "requests": count, "requests_per_s": count / took}]


def completed(address: str, prompts: Prompts, tokens: int, clients: int) -> float:
    """Return seconds until all are answered, with this many at a time."""

    def ask(prompt: Sequence[int]) -> None:
        body = {"prompt": list(prompt), "n_predict": tokens, "ignore_eos": True, "temperature": 0}
        request = Request(f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=600) as reply:
            predicted = json.load(reply)["tokens_predicted"]
        if predicted != tokens:
            raise RuntimeError(f"{predicted} of {tokens} tokens were made")

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask, prompts))
    return time.perf_counter() - started


def write_gguf(checkpoint: Path, file: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from gguf_files import write_gguf

    like = checkpoint.parent / "like-transformers"  # whose configurations say all of RoPE in one place
    like.mkdir(exist_ok=True)
    for own in checkpoint.iterdir():
        if own.name != "config.json":
            (like / own.name).symlink_to(own)
    config = json.loads((checkpoint / "config.json").read_text())
    (like / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_theta": config["rope_theta"]}}))
    write_gguf(like, file, config["model_type"], "F32", pre="qwen2")
    shutil.rmtree(like)
