"""A plain `ask` imports nothing that only other questions need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

OURS = ("cacheblend_cli", "cacheblend_documents", "cacheblend_store", "cacheblend_kernels")
MOST_FILES = 225
# prefixes of modules: several ranks, a tier, other decoders, and everything that reads or collects documents
FORBIDDEN = (
    "ray", "torch.distributed.tensor", "transformers",
    "cacheblend_cli.engine.ranks", "cacheblend_cli.model.ranks", "cacheblend_cli.model.rank_shard", "cacheblend_cli.model.sharded",
    "cacheblend_store.tier", "cacheblend_cli.kv.tiered_source", "cacheblend_cli.engine.request.tiered",
    "cacheblend_cli.engine.connectors",
    "cacheblend_cli.collect", "cacheblend_documents.formats", "cacheblend_documents.conversion", "cacheblend_cli.corpus.documents", "cacheblend_store.upkeep",
    "cacheblend_cli.model.generic.decoder", "cacheblend_cli.model.gguf_files", "cacheblend_cli.model.hub",
    "cacheblend_cli.server", "cacheblend_cli.evaluation", "cacheblend_cli.cli.chat", "cacheblend_cli.cli.serve", "http.server",
)  # fmt: skip
CODE = """
import sys
from cacheblend_cli.cli.main import run
code = run(sys.argv[1:])
print("MODULES", *sys.modules)
sys.exit(code)
"""


def modules_of(home: Path, *arguments: str) -> list[str]:
    """Run a command in a process of its own. Returns all modules that it imported."""
    env = os.environ | {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "CACHEBLEND_STORE": str(home / "store"),
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments], cwd=home, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.rpartition("MODULES")[2].split()


def test_a_plain_ask_imports_no_ranks_tier_connector_or_collector(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "ferry.txt").write_text("The ferry leaves at nine. It returns at noon.")
    stored = modules_of(tmp_path, "precompute", "--model", "handbook", "docs")
    assert "cacheblend_cli.collect.precompute" in stored
    modules = modules_of(tmp_path, "ask", "--model", "handbook", "--local", "--all", "When does the ferry leave?")
    assert "cacheblend_cli.kv.loader" in modules
    assert [m for m in modules if any(m == name or m.startswith(f"{name}.") for name in FORBIDDEN)] == []
    ours = [m for m in modules if m.split(".")[0] in OURS]
    assert len(ours) <= MOST_FILES, f"{len(ours)} modules: {' '.join(sorted(ours))}"
    before_answer = modules_of(
        tmp_path, "ask", "--model", "handbook", "--local", "--all", "--dry-run", "When does the ferry leave?"
    )
    assert "cacheblend_cli.claims" not in before_answer  # imported while the answer is shown
