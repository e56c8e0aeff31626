"""A precompute that computes nothing loads neither torch nor a tokenizer; a model that cannot be loaded changes
nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cacheblend_store import ChunkStore
from cacheblend_store.format.keys import blob_key
from command_line import Cli, process
from safetensors.torch import load_file, save_file

HEAVY = ("torch", "numpy", "transformers")
LIGHT = f"""
from cacheblend_cli.model import tokenizer
tokenizer._Stages.of = None  # parses tokenizer.json
code = run(sys.argv[1:])
print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)
sys.exit(code)
"""


def test_without_changes_neither_torch_nor_a_tokenizer_is_loaded(cli: Cli, docs: Path, stored: list[str]) -> None:
    def light(*arguments: str) -> str:
        done = process("precompute", "--kv-dtype", "exact", *arguments, code=LIGHT)
        assert done.code == 0, done.err
        assert done.err.endswith("[]\n")
        return done.out + done.err

    assert f"{len(stored)} unchanged" in light("docs")
    assert f"{len(stored)} unchanged" in light()
    assert light("docs", "--json").count('"status": "unchanged"') == len(stored)
    assert "0 tokens to compute" in light("docs", "--dry-run")
    assert f"{len(stored)} unchanged" in light("docs", "--max-size", "1GB")
    (docs / "beta.md").unlink()
    light("docs")
    assert "beta" not in cli("chunks", "ls").out


def test_a_model_that_cannot_be_loaded_changes_nothing(
    cli: Cli, docs: Path, model: Path, tmp_path: Path, stored: list[str]
) -> None:
    before = cli("chunks", "ls", "--json").out
    shutil.copytree(model, tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "other" / "model.safetensors")
    (docs / "beta.md").unlink()
    done = cli("precompute", "docs", "--model", str(tmp_path / "other"))
    assert done.code == 2
    assert "model.norm.weight" in done.err
    assert cli("chunks", "ls", "--json").out == before


@pytest.mark.parametrize("lost", ["removed", "damaged"])
def test_the_prompts_prefix_is_computed_again_if_its_kv_is_lost(
    cli: Cli, docs: Path, stored: list[str], tmp_path: Path, lost: str
) -> None:
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        [prefix] = [chunk for chunk in store.chunks(prefixes=True) if chunk.context == "prefix"]
        if lost == "removed":
            store.evict_chunks([prefix.key])
        else:
            store.transact(lambda writer: writer.put("blobs", blob_key(prefix.key, 0), b"x"))
    assert cli("precompute", "docs").code == 0
    with ChunkStore.open(tmp_path / "store", mode="read") as store:
        assert store.get_blobs(prefix.key) is not None
