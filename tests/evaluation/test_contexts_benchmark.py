"""benchmarks/contexts.py: what is asked over which layout, and that each context is measured against sink."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from checkpoints import write_checkpoint

from cacheblend_cli.api import Engine, EngineConfig
from cacheblend_cli.evaluation.samples import Sample, pages


@pytest.fixture(scope="module")
def contexts() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "contexts.py"
    spec = importlib.util.spec_from_file_location("contexts_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def sample(across: bool) -> Sample:
    texts = ("the lead of billing is Mara ", "she works in Bergen ", "she keeps a parrot ", "Jonas leads ", "at home ")
    return Sample("who?", ("Mara",), pages(["a", "a", "a", "b", "b"], texts), {"across": across})


def test_layouts_leave_left_contexts_as_they_were_collected(contexts: ModuleType) -> None:
    samples = [sample(True), sample(False)]
    found = contexts.layouts(samples)
    whole, shuffled, headless = found.values()
    assert whole == samples
    assert all({*s.contexts} == {*t.contexts} for s, t in zip(whole, shuffled, strict=True))
    assert any(s.contexts != t.contexts for s, t in zip(whole, shuffled, strict=True))
    [without] = headless  # the other's answer stands in what is left out
    assert [c.text.strip() for c in without.contexts] == ["she works in Bergen", "she keeps a parrot", "at home"]
    assert without.contexts[1].before == whole[0].contexts[2].before
    assert contexts.layouts(samples) == found


def test_every_layout_is_measured_in_every_context(contexts: ModuleType, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "llama-gqa")
    engine = Engine.load(EngineConfig(model=str(tmp_path / "model"), block_size=16))
    found = contexts.measure(engine, [sample(True)], max_tokens=4)
    for rows in found.values():
        by_label = {row["label"]: row for row in rows}
        assert list(by_label) == [
            "full prefill",
            *(f"{m}, {c}" for c in contexts.CONTEXTS for m in ("reuse", "hkvd 0.15")),
        ]
        assert by_label["reuse, sink"]["f1_less_sink"] is None
        assert by_label["reuse, document"]["f1_less_sink"] is not None
    whole = {row["label"]: row for row in found["whole pages"]}
    assert whole["reuse, document"]["kl"]["value"] < whole["reuse, sink"]["kl"]["value"]
    result = {"hardware": contexts.hardware(), "model": "x", "layouts": found}
    assert contexts.table(result).count("| reuse, document |") == 3
