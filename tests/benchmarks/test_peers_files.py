"""benchmarks/peers_files.py and random_blocks.py: a file of random blocks, CPU time beyond imports, rows left out."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest
from cacheblend_kernels import compiled
from gguf import GGMLQuantizationType as Kind


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def random_blocks(benchmarks: None) -> ModuleType:
    return importlib.import_module("random_blocks")


@pytest.fixture
def peers_files(benchmarks: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    module = importlib.import_module("peers_files")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "peers_files.json")
    return module


@pytest.fixture
def shape_file(random_blocks: ModuleType, tmp_path: Path) -> Path:
    like, file = tmp_path / "like.gguf", tmp_path / "shape.gguf"
    writer = gguf.GGUFWriter(like, "qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(300)])
    writer.add_bos_token_id(7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    random_blocks.write_file(file, like, random_blocks.Shape(layers=8, dim=256, mlp_dim=512, heads=4, kv_heads=2))
    return file


def test_a_file_of_random_blocks_has_the_layout_of_q4_k_m(shape_file: Path) -> None:
    reader = gguf.GGUFReader(shape_file)
    found = {tensor.name: tensor for tensor in reader.tensors}
    downs = [found[f"blk.{layer}.ffn_down.weight"].tensor_type.name for layer in range(8)]
    assert downs == ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"]
    assert found["output.weight"].tensor_type == Kind.Q6_K
    assert list(found["blk.0.attn_k.weight"].shape) == [256, 128]
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == found["token_embd.weight"].shape[1] == 300
    assert reader.fields["tokenizer.ggml.bos_token_id"].contents() == 7
    assert not shape_file.with_suffix(".part").exists()


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4", "BF16"]
)
def test_random_blocks_are_weights_of_ordinary_size(random_blocks: ModuleType, kind: str) -> None:
    rows = random_blocks.random_rows(Kind[kind], 64, 1024, np.random.default_rng(0))
    weights = gguf.dequantize(rows, Kind[kind])
    assert weights.shape == (64, 1024)
    assert 0.01 < weights.std() < 0.04
    assert abs(weights.mean()) < 0.01


def test_the_cpu_time_of_imports_is_taken_off(peers_files: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    imports = 'import json, sys\nassert json.load(sys.stdin) == ["json"]\nprint(json.dumps({"cpu": 1.5}))'
    monkeypatch.setattr(peers_files, "IMPORTS", imports)
    loads = """print('{"cpu": 4.0, "modules": ["json"]}')"""
    assert peers_files.load_cpu_s([sys.executable, "-c", loads]) == 2.5


def test_a_program_is_cut_where_its_model_is_loaded(peers_files: ModuleType) -> None:
    for program in (peers_files.XLLAMACPP, peers_files.TRANSFORMERS, peers_files.OURS):
        cut = peers_files.only_loading(program)
        compile(cut, "program", "exec")
        assert "process_time()" in cut
        assert cut.count("print") == 1


def test_what_does_not_fit_or_cannot_be_forced_is_named(
    peers_files: ModuleType, shape_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_files, "_ours_is_avx2", lambda: False)
    monkeypatch.setattr(peers_files, "find_spec", lambda name: name == "accelerate")
    (tmp_path / "shape chunks").write_text("a,b")
    file = peers_files.ModelFile(shape_file, tmp_path)
    rows, left_out = peers_files.rows_of(file, None, avx2=False, memory_gib=64)
    assert {"shape: cacheblend, full", "shape: cacheblend, query .15"} < set(rows)
    assert {name for name in rows if "transformers" in name and "dequantised" in name} == {
        f"shape: transformers, dequantised to {dtype}" for dtype in ("float32", "bfloat16")
    }
    rows, left_out = peers_files.rows_of(file, tmp_path / "peer", avx2=True, memory_gib=64)
    assert not any("cacheblend" in name or "bfloat16" in name for name in rows)
    assert [line.split(":")[0] for line in left_out][:1] == ["cacheblend"]
    assert rows["shape: ik_llama.cpp"][1][-1] == "load"
    rows, left_out = peers_files.rows_of(file, None, avx2=False, memory_gib=0)
    assert not any("transformers" in name for name in rows)
    assert any("does not fit" in line for line in left_out)
    monkeypatch.setattr(peers_files, "find_spec", lambda name: None)
    rows, left_out = peers_files.rows_of(file, None, avx2=False, memory_gib=64)
    assert {line.split(":")[0] for line in left_out} == {"llama.cpp", "transformers"}


def test_a_variable_of_torch_limits_the_compiled_code_to_avx2(
    peers_files: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled.loaded("_cpu_avx2") is None:
        pytest.skip("the compiled code for AVX2 was not built, or does not load")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert peers_files._ours_is_avx2()


def test_the_page_has_a_part_per_machine_and_what_is_left_out(peers_files: ModuleType) -> None:
    run = dict.fromkeys(peers_files.COLUMNS.values(), 2.0)
    here = {"hardware": {"cores": 2, "memory_gib": 8, "torch": "2"}, "notes": {}, "runs": {"f: llama.cpp": [run]}}
    peers_files.write({"machines": {"one, AVX2": here | {"left_out": ["ik_llama.cpp: not built"]}, "two, AMX": here}})
    page = peers_files.RESULTS.with_suffix(".md").read_text()
    assert page.index("## one, AVX2") < page.index("Left out: ik_llama.cpp: not built.") < page.index("## two, AMX")
    assert "| f: llama.cpp | 2.00 | 2.00 | 2.00 | 2.0 | 2 | 1 |" in page
