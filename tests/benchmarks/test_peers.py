"""benchmarks/peers.py and random_blocks.py: runs are kept by machine, rows left out, a file of random blocks."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
from cacheblend_kernels import compiled
from gguf import GGMLQuantizationType as Kind

PROGRAM = """
import json, os, time
assert "OMP_NUM_THREADS" not in os.environ
now = time.time()
print(json.dumps({"loaded": now, "first": now + 1, "last": now + 3}))
"""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("peers")


@pytest.fixture
def shape_file(peers: ModuleType, tmp_path: Path) -> Path:
    like, file = tmp_path / "like.gguf", tmp_path / "shape.gguf"
    writer = gguf.GGUFWriter(like, "qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(300)])
    writer.add_bos_token_id(7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    blocks = importlib.import_module("random_blocks")
    blocks.write_file(file, like, blocks.Shape(layers=8, dim=256, mlp_dim=512, heads=4, kv_heads=2))
    return file


def test_a_row_is_run_until_the_time_is_over_and_a_program_that_fails_once(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    here, kept = dict[str, Any](runs={}), list[int]()
    rows = {"works": [sys.executable, "-c", PROGRAM], "fails": [sys.executable, "-c", "1 / 0"]}
    arguments = argparse.Namespace(seconds=0.0, others=float("inf"))
    peers.measure(rows, here, arguments, lambda: kept.append(1), lambda name, _: peers.run(rows[name]))
    assert {name: len(runs) for name, runs in here["runs"].items()} == {"works": 1, "fails": 0}
    [run] = here["runs"]["works"]
    assert run["process_last_s"] - run["process_first_s"] == pytest.approx(2, abs=0.01)
    assert run["peak_mib"] > 1
    assert kept == [1]


def test_a_command_is_timed_to_its_first_character_and_its_end(peers: ModuleType) -> None:
    program = "import os, sys; assert sys.argv[1] == '7'; print(flush=True); os.write(1, b'a'); sys.stdout.close()"
    found = peers.stream([sys.executable, "-c", program, "RUN"], 7)
    assert 0 < found["process_first_s"] <= found["process_last_s"]
    for failing in ("print('a'); exit(3)", "print()"):
        with pytest.raises(peers.Died):
            peers.stream([sys.executable, "-c", failing], 1)


def test_a_file_of_random_blocks_has_the_layout_of_q4_k_m(shape_file: Path) -> None:
    reader = gguf.GGUFReader(shape_file)
    found = {tensor.name: tensor for tensor in reader.tensors}
    downs = [found[f"blk.{layer}.ffn_down.weight"].tensor_type.name for layer in range(8)]
    assert downs == ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"]
    assert found["output.weight"].tensor_type == Kind.Q6_K
    assert list(found["blk.0.attn_k.weight"].shape) == [256, 128]
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == found["token_embd.weight"].shape[1] == 300
    assert reader.fields["tokenizer.ggml.bos_token_id"].contents() == 7
    weights = gguf.dequantize(found["blk.0.ffn_up.weight"].data, Kind.Q4_K)
    assert 0.01 < np.std(weights) < 0.04
    assert not shape_file.with_suffix(".part").exists()


def test_what_does_not_fit_or_cannot_be_forced_is_named(
    peers: ModuleType, shape_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_ours_is_avx2", lambda: False)
    monkeypatch.setattr(peers, "_version", lambda python: "1")
    monkeypatch.setattr(peers, "find_spec", lambda name: name == "accelerate")
    (tmp_path / "shape chunks").write_text("a,b")
    file = peers.Model(shape_file, tmp_path)
    rows, left_out = peers.rows_of_file(file, None, avx2=False, memory_gib=64)
    assert {"shape: cacheblend, full", "shape: cacheblend, query .15"} < set(rows)
    assert [line.split(":")[0] for line in left_out] == ["llama.cpp"]
    assert {name for name in rows if "transformers" in name} == {
        f"shape: transformers, dequantised to {dtype}" for dtype in ("float32", "bfloat16")
    }
    rows, left_out = peers.rows_of_file(file, "python", avx2=True, memory_gib=64)
    assert not any("cacheblend" in name or "bfloat16" in name for name in rows)
    assert [line.split(":")[0] for line in left_out] == ["cacheblend"]
    rows, left_out = peers.rows_of_file(file, "python", avx2=False, memory_gib=0)
    assert not any("transformers" in name for name in rows)
    assert any("does not fit" in line for line in left_out)


def test_a_variable_of_torch_limits_the_compiled_code_to_avx2(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled.loaded("_cpu_avx2") is None:
        pytest.skip("the compiled code for AVX2 was not built, or does not load")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert peers._ours_is_avx2()


def test_the_page_has_a_part_per_machine_and_what_is_left_out(peers: ModuleType) -> None:
    run = dict.fromkeys(peers.COLUMNS.values(), 2.0)
    here = {"hardware": {"cores": 2, "memory_gib": 8, "torch": "2"}, "runs": {"f: llama.cpp": [run]}}
    machines = {"one, AVX2": here | {"left_out": ["llama.cpp: none"]}, "two, AMX": here}
    page = peers.page({"machines": machines})
    assert page.index("## one, AVX2") < page.index("Left out: llama.cpp: none.") < page.index("## two, AMX")
    assert "| f: llama.cpp | 2.00 | 2.00 | 2.00 | 2.0 | 2 | 1 |" in page
    assert "| f: llama.cpp | 2.00 | 2.00 |  | 1 |" in peers.page({"start": True, "machines": machines})
