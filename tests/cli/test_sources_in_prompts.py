"""{source} in a prompt, and --overlap: from precompute to the answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Cli = Callable[..., Any]
PROMPT = "Documents:\n\n[{source}]\n{chunks}\n\nQuestion: {question}"


def test_the_source_is_a_part_of_the_chunk_and_of_the_prompt(cli: Cli, docs: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    flags = ("--prompt", "prompt.txt")
    assert cli("precompute", "docs", "--chunk-tokens", "60", *flags).code == 0
    for listed in cli("chunks", "ls", "--json").records:
        shown = cli("chunks", "show", listed["id"], "--json").records[0]
        name = listed["source"].removeprefix("docs/").removesuffix(".md")
        assert shown["text"].startswith(f"[{name}]\n")
        assert shown["headings"] == [name]
        assert shown["lines"][0] >= 1
        assert shown["tokens"] <= 60
    assert {r["status"] for r in cli("precompute", "docs", *flags, "--json").records} == {"unchanged"}
    answer = cli("ask", "alpha", *flags, "--ratio", "1", "--max-tokens", "4", "--verify", "--explain", "--json")
    assert answer.code == 0, answer.err
    [record] = answer.records
    assert {c["status"] for c in record["chunks"]} <= {"exact", "blended"}
    assert record["verify"]["top1_agree"] == 1.0
    assert "the prompt reads" not in answer.err


def test_another_line_with_the_source_is_said_before_anything_is_computed(cli: Cli, docs: Path, tmp_path: Path) -> None:
    for name, head in (("a.txt", "[{source}]"), ("b.txt", "From {source}:")):
        (tmp_path / name).write_text(PROMPT.replace("[{source}]", head))
    assert cli("precompute", "docs", "--chunk-tokens", "60", "--prompt", "a.txt").code == 0
    refused = cli("precompute", "docs", "--prompt", "b.txt")
    assert refused.code == 2
    assert "--prompt's {source} 'From {source}:'" in refused.err
    assert cli("precompute", "docs", "--prompt", "b.txt", "--yes").code == 0


def test_an_overlap_is_remembered_and_asked_for(cli: Cli, docs: Path) -> None:
    assert cli("precompute", "docs", "--chunk-tokens", "40").code == 0
    refused = cli("precompute", "docs", "--overlap", "12")
    assert refused.code == 2
    assert "--overlap 12" in refused.err
    assert cli("precompute", "docs", "--overlap", "12", "--yes").code == 0
    listed = [r for r in cli("chunks", "ls", "--json").records if r["source"] == "docs/alpha.md"]
    first, second = sorted(listed, key=lambda r: r["index"])[:2]
    assert second["span"][0] < first["span"][1], "the second begins within the first"
    again = cli("precompute", "docs", "--json")
    assert {r["status"] for r in again.records} == {"unchanged"}
    assert cli("precompute", "docs", "--overlap", "30").code == 2, "more than half of a chunk"
