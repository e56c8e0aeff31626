"""benchmarks/compression.py: what a codec alone makes of a prompt is told apart from what blending does."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from checkpoints import WORDS, write_checkpoint

from cacheblend_cli.api import BlendConfig, EngineConfig
from cacheblend_cli.evaluation.evaluate import EvaluateOptions
from cacheblend_cli.evaluation.samples import Context, Sample
from cacheblend_cli.evaluation.settings import Setting

SAMPLE = Sample("where does Mara work?", (), tuple(Context(" ".join(WORDS[p : p + 9]) + f" {p}. ") for p in range(3)))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("compression")


def test_a_codecs_error_is_its_own(script: ModuleType, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "llama-gqa")
    setting = Setting("all", BlendConfig(ratio=1.0))
    kl, sizes = {}, {}
    for codec in ("auto", "int8", "int4"):
        config = EngineConfig(model=str(tmp_path / "model"), dtype="float32", block_size=16, kv_dtype=codec)
        sizes[codec], found = script.compression(config, [SAMPLE], [setting], EvaluateOptions(6))
        kl[codec] = {s.label: s.kl.value for s in found if s.kl}
    assert kl["auto"]["codec alone"] < 1e-8 < kl["int8"]["codec alone"] < kl["int4"]["codec alone"]
    assert all(errors["reuse"] > 1e-4 for errors in kl.values())
    assert sizes["auto"] > sizes["int8"] > sizes["int4"]
