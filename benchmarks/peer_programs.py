"""Minimal programs for the same token ids with other libraries, each run by its own Python: `python -c PROGRAM MODEL
IDS KIND`.

IDS is a JSON file of token ids, KIND the dtype (where the program takes one). A fourth argument "plain" turns
llama.cpp's extra buffer types off. Each prints {"loaded", "first", "last"}: `time.time()` when model and ids are ready,
at the first token, and at the hundredth. Greedy, 100 tokens, without an end of text.
"""

import os

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

LLAMA_CPP = """
import json, os, sys, time
import numpy as np
from llama_cpp import llama_cpp as lib
path, ids, kind, *plain = sys.argv[1:]
ids = json.load(open(ids))
lib.llama_backend_init()
loading = lib.llama_model_default_params()
if plain:
    loading.use_extra_bufts = False
model = lib.llama_model_load_from_file(path.encode(), loading)
params = lib.llama_context_default_params()
params.n_ctx = params.n_batch = len(ids) + 256
params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
context = lib.llama_init_from_model(model, params)
size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
def next_after(tokens):
    array = (lib.llama_token * len(tokens))(*tokens)
    assert lib.llama_decode(context, lib.llama_batch_get_one(array, len(tokens))) == 0
    return int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), (size,)).argmax())
loaded = time.time()
token = next_after(ids)
first = time.time()
for _ in range(99):
    token = next_after([token])
print(json.dumps({"loaded": loaded, "first": first, "last": time.time()}))
"""

XLLAMACPP = (
    f"FOLDER = {os.path.dirname(os.path.abspath(__file__))!r}"
    + """
import json, os, sys, time
from pathlib import Path
import numpy as np
sys.path.insert(0, FOLDER)
from llama_cpp_library import library
path, ids = sys.argv[1:]
ids, threads = json.load(open(ids)), len(os.sched_getaffinity(0))
lib = library()
model = lib.load_model(Path(path))
context = lib.new_context(model, len(ids) + 256, 1, threads, num_batch=512)
size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
batch = lib.llama_batch_init(512, 0, 1)
def next_after(tokens, start):
    for first in range(0, len(tokens), 512):
        part = tokens[first : first + 512]
        batch.n_tokens = len(part)
        for row, token in enumerate(part):
            batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, start + first + row, 1, row == len(part) - 1
            batch.seq_id[row][0] = 0
        assert lib.llama_decode(context, batch) == 0
    return int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), (size,)).argmax())
loaded = time.time()
token = next_after(ids, 0)
first = time.time()
for step in range(99):
    token = next_after([token], len(ids) + step)
print(json.dumps({"loaded": loaded, "first": first, "last": time.time()}))
"""
)

VLLM = """
import json, os, sys, time
cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))  # all: by default one is kept free
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": cpus}
from vllm import LLM, SamplingParams
path, ids, kind = sys.argv[1:]
prompt = {"prompt_token_ids": json.load(open(ids))}
if __name__ == "__main__":
    llm = LLM(path, dtype=kind, skip_tokenizer_init=True, enable_prefix_caching=False, max_model_len=4096, max_num_seqs=1)
    def run(count):
        start = time.time()
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False), use_tqdm=False)
        return time.time() - start
    loaded = time.time()
    first, last = run(1), run(100)  # a run each: it tells nothing of single tokens
    print(json.dumps({"loaded": loaded, "first": loaded + first, "last": loaded + last}))
"""
