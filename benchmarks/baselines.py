"""Minimal programs for the same token ids with other libraries, and GGUF files of a checkpoint for them.

`python -c PROGRAM MODEL IDS KIND` is one measured process: IDS is a JSON file of token ids, KIND the dtype. It prints
{"loaded", "first", "last"}: `time.time()` when model and ids are ready, at the first token, and at the hundredth.
Greedy, 100 tokens, without an end of text.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from machine import ROOT

TRANSFORMERS = """
import json, os, sys, time
import torch
from transformers import AutoModelForCausalLM
path, ids, kind = sys.argv[1:]
folder, name = os.path.split(path) if path.endswith(".gguf") else (path, None)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=getattr(torch, kind)).eval()
row, times = torch.tensor([json.load(open(ids))]), []
class Clock:
    def put(self, token): times.append(time.time())
    def end(self): pass
loaded = time.time()
model.generate(row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=100, min_new_tokens=100, streamer=Clock())
times = times[-100:]  # the streamer is given the prompt, too
print(json.dumps({"loaded": loaded, "first": times[0], "last": times[-1]}))
"""
LLAMA_SERVER = """
import json, os, sys, time
from urllib.request import Request, urlopen
import xllamacpp
def start(path, context, slots, threads):
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = path, context, slots, 0
    params.kv_unified, params.fit_params, params.ui, params.port, params.warmup = False, False, False, 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)
"""
LLAMA_CPP = (
    LLAMA_SERVER
    + """
path, ids = sys.argv[1:3]
prompt = json.load(open(ids))
server = start(path, len(prompt) + 256, 1, len(os.sched_getaffinity(0)))
loaded = time.time()
body = {"prompt": prompt, "n_predict": 100, "ignore_eos": True, "temperature": 0}
asked = Request(server.listening_address + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
timings = json.load(urlopen(asked))["timings"]
assert timings["predicted_n"] == 100, timings
first = loaded + timings["prompt_ms"] / 1000
print(json.dumps({"loaded": loaded, "first": first, "last": first + timings["predicted_ms"] / 1000}), flush=True)
os._exit(0)
"""
)
LLAMA_SLOTS = (
    LLAMA_SERVER
    + "server = start(*json.loads(sys.argv[1]))\nprint(server.listening_address, flush=True)\nsys.stdin.read()"
)
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


@contextmanager
def llama_server(python: str, file: Path, context: int, slots: int, threads: int) -> Iterator[str]:
    """Run llama.cpp's server by an interpreter with xllamacpp. Yields its address."""
    command = [python, "-c", LLAMA_SLOTS, json.dumps([str(file), context, slots, threads])]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as server:
        try:
            if not (address := server.stdout.readline().strip()):
                raise RuntimeError(f"the server ended at once: {python}")
            yield address
        finally:
            server.kill()


def complete(address: str, prompt: Sequence[int], tokens: int) -> None:
    """Ask llama.cpp's server for that many tokens."""
    body = {"prompt": list(prompt), "n_predict": tokens, "ignore_eos": True, "temperature": 0}
    request = Request(f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=600) as reply:
        predicted = json.load(reply)["tokens_predicted"]
    if predicted != tokens:
        raise RuntimeError(f"{predicted} of {tokens} tokens were made")


def write_gguf(checkpoint: Path, file: Path, kind: str) -> None:
    """Write a checkpoint's weights as a GGUF file."""
    sys.path.append(str(ROOT / "tests" / "support"))
    from gguf_files import write_gguf

    like = file.with_suffix(".transformers")  # whose configuration has all of RoPE in one place
    like.mkdir(exist_ok=True)
    for own in checkpoint.iterdir():
        if own.name != "config.json":
            (like / own.name).symlink_to(own)
    config = json.loads((checkpoint / "config.json").read_text())
    (like / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_theta": config["rope_theta"]}}))
    write_gguf(like, file, config["model_type"], kind, pre="qwen2")
    shutil.rmtree(like)
