"""Messages of `ask` besides the answer: notes, --explain, omitted hits, and the model."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bare_store import bare_writing
from cacheblend_store import ChunkStore
from cacheblend_store.format.keys import blob_key
from checkpoints import write_checkpoint
from text_tokenizers import write_text_tokenizer

from cacheblend_cli.cli.answer_output import first_token_line, seconds_to_start, summary_line
from cacheblend_cli.model.named import FALLBACK_NOTE
from cacheblend_cli.types import Answer, Timing, Verification

Cli = Callable[..., Any]


def spoil(store: Path, database: str, key: bytes) -> None:
    """Flip a bit of the record's last byte."""
    with ChunkStore.open(store, mode="write") as opened, bare_writing(opened) as (transaction, dbs):
        record = bytearray(transaction.get(key, db=dbs[database]))
        record[-1] ^= 1
        transaction.put(key, bytes(record), db=dbs[database])


def test_a_chunk_with_bad_kv_is_named_in_the_json(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    ask = ("ask", "who leads?", "--chunks", ",".join(stored[:2]), "--max-tokens", "2", "--json")
    assert cli(*ask).records[0]["notes"] == []
    spoil(tmp_path / "store", "blobs", blob_key(bytes.fromhex(stored[1]), 0))
    [answer] = cli(*ask).records
    assert [c["status"] for c in answer["chunks"]] == ["exact", "computed"]
    assert answer["notes"][0].startswith(f"stored KV {stored[1][:12]} is not used, it is computed:")
    assert len(answer["notes"]) == 1


def test_damaged_records_behind_a_sound_chunk_are_named(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    """The record of the prefix, which is then computed, and of the document, which has the chunk's place."""
    ask = ("ask", "who leads?", "--chunks", stored[0], "--max-tokens", "2", "--json", "--no-save")
    [sound] = cli(*ask).records
    assert sound["chunks"][0]["place"]
    with ChunkStore.open(tmp_path / "store") as store, store.read() as reader:
        [prefix] = [m for m in store.chunks(prefixes=True) if m.context == "prefix"]
        [document] = reader.documents_of(bytes.fromhex(stored[0]))
    spoil(tmp_path / "store", "chunks", prefix.key)
    spoil(tmp_path / "store", "documents", document)
    [answer] = cli(*ask).records
    assert answer["answer"] == sound["answer"]
    assert answer["chunks"][0]["place"] == ""
    [places, computed] = sorted(answer["notes"])
    assert computed.startswith(f"stored KV {prefix.id[:12]} is not used, it is computed: record")
    assert places.startswith("document records are damaged")
    assert cli("chunks", "verify", "--repair").code == 0
    assert cli("precompute", "docs").code == 0
    assert cli(*ask).records[0]["chunks"] == sound["chunks"]


def test_hits_that_do_not_fit_are_left_out_and_counted(cli: Cli, stored: list[str]) -> None:
    """The context is 1,024 tokens. What was named is not touched, but refused with the numbers."""
    ask = ("ask", "alpha beta lead?", "--top-k", "6", "--json")
    [everything] = cli(*ask, "--max-tokens", "2").records
    count = len(everything["chunks"])
    assert count > 2
    assert everything["notes"] == []
    room = str(1024 - everything["prompt_tokens"] + sum(c["tokens"] for c in everything["chunks"][:-2]))
    result = cli(*ask, "--max-tokens", room, *(f"--stop={letter}" for letter in "aeiou "))
    assert result.code == 0, result.err
    [answer] = result.records
    assert answer["prompt_tokens"] + int(room) <= 1024
    left = count - len(answer["chunks"])
    assert left >= 1
    told = answer["notes"][0]
    assert told.startswith(f"{left} of the {count} chunks")
    assert "1,024 tokens" in answer["notes"][0]
    assert told in result.err
    [plan] = cli(*ask, "--max-tokens", room, "--dry-run").records
    assert [c["id"] for c in plan["chunks"]] == [c["id"] for c in answer["chunks"]]
    assert plan["notes"] == answer["notes"][:1]
    assert told in cli("ask", "alpha beta lead?", "--top-k", "6", "--max-tokens", room, "--dry-run").err
    named = ",".join(c["id"] for c in everything["chunks"])
    refused = cli("ask", "alpha beta lead?", "--chunks", named, "--max-tokens", room)
    assert refused.code == 2
    assert room in refused.err


def test_the_best_hits_are_kept(cli: Cli, stored: list[str]) -> None:
    best = cli("search", "alpha beta lead?", "-q").out.split()
    for count in (1, 2, 3):
        [answer] = cli("ask", "alpha beta lead?", "--top-k", str(count), "--max-tokens", "2", "--json").records
        room = 1024 - answer["prompt_tokens"]
        [kept] = cli("ask", "alpha beta lead?", "--max-tokens", str(room), "--dry-run", "--json").records
        assert {c["id"] for c in kept["chunks"]} >= set(best[:count])


def test_an_answer_without_room_for_any_hit_is_refused_with_the_numbers(cli: Cli, stored: list[str]) -> None:
    result = cli("ask", "alpha?", "--max-tokens", "1010")
    assert result.code == 2
    assert "1010" in result.err


def explained(cli: Cli, stored: list[str], *flags: str) -> list[str]:
    result = cli("ask", "who leads?", "--chunks", ",".join(stored[:3]), "--max-tokens", "2", "--explain", *flags)
    assert result.code == 0, result.err
    return result.err.splitlines()


def test_layers_that_do_the_same_are_one_line(cli: Cli, stored: list[str]) -> None:
    lines = explained(cli, stored, "--ratio", "0.5")
    [layers] = [line for line in lines if "layer" in line]
    assert layers.startswith("all 4 layers compute ")
    [full] = [line for line in explained(cli, stored, "--mode", "full") if "layer" in line]
    assert full.startswith("all 4 layers compute the whole prompt, ")
    [reuse] = [line for line in explained(cli, stored, "--mode", "reuse") if "layer" in line]
    assert reuse.endswith(" that are not cached")


def test_layers_that_differ_are_told_in_words(cli: Cli, stored: list[str]) -> None:
    lines = [line for line in explained(cli, stored, "--selector", "hkvd", "--ratio", "0.5") if "layer" in line]
    assert [line.split(" ", 2)[:2] for line in lines] == [["layer", "0"], ["layer", "1"], ["layers", "2"]]
    assert len(lines) > 1
    assert lines[2].startswith("layers 2 and 3 compute ")
    assert not any(word in line for line in lines for word in ("PREFILL", "CHECK", "rows"))


def test_each_chunk_is_told_in_words(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    spoil(tmp_path / "store", "blobs", blob_key(bytes.fromhex(stored[2]), 0))
    lines = explained(cli, stored, "--ratio", "0.5", "--no-save")
    found = {line.split()[1]: line for line in lines if line.startswith("chunk ")}
    assert "exact here" in found[stored[0][:12]]
    assert "recomputed" in found[stored[1][:12]]
    assert "tokens computed" in found[stored[2][:12]]


def test_explain_tells_what_a_tokenizer_reads_otherwise_than_it_is_written(
    cli: Cli, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that writes a space behind a control token, whatever is cut where; and one that joins empty lines, if not
    those on the two sides of a cut."""
    monkeypatch.setenv("CACHEBLEND_MODEL", str(tmp_path / "piece"))
    write_checkpoint(tmp_path / "piece", "llama-gqa", vocab_size=512, max_position_embeddings=2048)
    told: dict[str, list[str]] = {}
    for kind in ("gemma", "llama2-legacy", "joins-lines"):
        template = "{{ bos_token }}[INST]{{ messages[0]['content'] }} [/INST]"
        write_text_tokenizer(tmp_path / "piece", kind, template)
        ids = cli("precompute", "docs/alpha.md", "--chunk-tokens", "40", "--json").records
        assert len(ids) > 1
        ask = ("ask", "who leads?", "--chunks", ",".join(r["id"] for r in ids), "--max-tokens", "2", "--explain")
        told[kind] = [line for line in cli(*ask).err.splitlines() if "reads" in line]
        [answer] = cli(*ask, "--json").records
        assert [note for note in answer["notes"] if "reads" in note] == told[kind]
    assert told["gemma"] == []
    [legacy] = told["llama2-legacy"]
    assert "'<s>[INST] Documents:" in legacy
    assert "'<s>[INST]Documents:" in legacy
    assert "even without cutting" in legacy
    assert any("cut into chunks" in line for line in told["joins-lines"])


def test_a_question_comes_through_a_pipe_without_a_dash(cli: Cli, stored: list[str]) -> None:
    plain = cli("ask", "who leads?", "--chunks", stored[0], "--max-tokens", "4", "--ids", "--json").records[0]
    piped = cli("ask", "--chunks", stored[0], "--max-tokens", "4", "--ids", "--json", stdin="who leads?\n").records[0]
    assert piped["prompt_ids"] == plain["prompt_ids"]
    silent = cli("ask", "--chunks", stored[0])
    assert silent.code == 2


def test_an_interrupt_says_what_is_true_of_the_command(
    cli: Cli, docs: Path, stored: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cacheblend_cli.engine.engine import Engine
    from cacheblend_cli.engine.stored_documents import StoredDocuments
    from cacheblend_cli.evaluation import evaluate

    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    def interrupted(*arguments: str) -> str:
        result = cli(*arguments)
        assert result.code == 130, result.err
        assert "error" not in result.err
        message, _, hint = result.err.strip().splitlines()[-1].partition("; ")
        assert message == "interrupted"
        return hint

    monkeypatch.setattr(Engine, "events", stop)
    monkeypatch.setattr(StoredDocuments, "precompute", stop)
    assert interrupted("precompute", "docs")
    assert interrupted("precompute", "docs", "--dry-run") == ""
    assert interrupted("ask", "alpha?") == ""
    monkeypatch.setattr(evaluate, "evaluate", stop)
    (tmp_path / "d.jsonl").write_text('{"question": "q?", "ctxs": [{"text": "alpha"}]}\n')
    assert interrupted("eval", "d.jsonl") == ""
    assert "--resume o" in interrupted("eval", "d.jsonl", "--out", "o")
    monkeypatch.setattr(ChunkStore, "chunks", stop)
    assert interrupted("chunks", "ls") == ""


def test_an_interrupted_pull_keeps_what_it_took(
    cli: Cli, stored: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/tier"
    assert cli("chunks", "push", url).code == 0
    count = 0

    def stop(*args: object) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("cacheblend_store.upkeep.moving._BATCH_BYTES", 1)  # a transaction a chunk
    monkeypatch.setattr("cacheblend_cli.cli.tier._on_chunk", stop)
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "other"))
    result = cli("chunks", "pull", url)
    assert result.code == 130
    assert result.err.strip().splitlines()[-1].startswith("interrupted; ")
    with ChunkStore.open(tmp_path / "other") as store:
        assert sum(m.has_kv for m in store.chunks(prefixes=True)) == 2


def test_an_answer_that_was_cut_says_so(cli: Cli, stored: list[str]) -> None:
    cut = cli("ask", "who?", "--chunks", stored[0], "--max-tokens", "3")
    whole = cli("ask", "who?", "--chunks", stored[0], "--max-tokens", "3", "--regex", "a")
    assert "--max-tokens" in cut.err
    assert "--max-tokens" not in whole.err


def test_verify_says_where_the_answers_part(cli: Cli, stored: list[str]) -> None:
    asked = ("ask", "who?", "--chunks", ",".join(stored[:3]), "--max-tokens", "8", "--verify")
    exact = cli(*asked, "--ratio", "1", "--json").records[0]["verify"]
    assert (exact["same_answer"], exact["first_difference"]) == (True, None)
    full, reused = (cli(*asked, "--mode", mode, "--json").records[0] for mode in ("full", "reuse"))
    ids = [cli(*asked, "--mode", mode, "--json", "--ids").records[0]["generated_ids"] for mode in ("full", "reuse")]
    first = next((i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), None)
    assert full["verify"]["first_difference"] is None
    assert reused["verify"]["first_difference"] == first


@pytest.mark.parametrize("flag", ["--verify", "--confirm"])
def test_both_first_tokens_are_shown_side_by_side(cli: Cli, stored: list[str], flag: str) -> None:
    asked = ("ask", "who?", "--chunks", ",".join(stored[:3]), "--max-tokens", "3", flag, "-v")
    both = re.compile(r"first token: blended (\d+\.\d+) s, full prefill (\d+\.\d+) s \(\d+\.\d x\)$")
    [line] = [line for line in cli(*asked).err.splitlines() if "first token: " in line]
    assert both.search(line)
    [reused] = [line for line in cli(*asked, "--mode", "reuse").err.splitlines() if "first token: " in line]
    assert "first token: plain reuse " in reused


def test_the_first_token_is_measured_from_the_loaded_model() -> None:
    timing = Timing(
        process_s=4.0, model_load_s=1.0, kv_load_s=0, kv_load_stall_s=0, prefill_s=0, ttft_s=0.9, decode_tokens_per_s=0
    )
    answer = Answer("", "stop", "m", "blend", "query", 0.15, 2200, 2031, 0, 305, 0.15, [], timing, 0, [], [])
    work = "first token after 0.90 s; 15% of 2,031 cached tokens recomputed"
    assert summary_line(answer, 5.0, 3.1) == f"5.0 s: 3.1 s to start, then {work}"
    assert summary_line(answer, 3.1) == f"3.1 s, {work}"
    warm = replace(timing, model_load_s=0.0)
    assert seconds_to_start(timing) == seconds_to_start(warm) == pytest.approx(3.1), (
        "also while the running engine was still loading"
    )
    assert seconds_to_start(replace(warm, process_s=1.2)) == 0.0
    held = replace(answer, mode="full", cached_tokens=0, prefix_cache_tokens=2192)
    assert summary_line(held, 3.1).endswith(
        "full prefill of 2,200 tokens; 2,192 tokens were still in memory from an earlier prompt"
    )
    assert first_token_line(replace(answer, verify=verified(8.1))).endswith(
        "blended 0.90 s, full prefill 8.10 s (9.0 x)"
    )
    assert first_token_line(answer).endswith("blended 0.90 s; --verify measures a full prefill's")
    estimated = replace(answer, timing=replace(timing, full_ttft_s=4.5))
    assert first_token_line(estimated).endswith("blended 0.90 s; a full prefill takes about 4.50 s (5.0 x)")
    assert first_token_line(replace(estimated, verify=verified(8.1))).endswith("full prefill 8.10 s (9.0 x)")


def verified(full_ttft_s: float) -> Verification:
    return Verification(0, True, full_ttft_s, 0, 1, 3, True, None)


def test_an_answer_that_repeats_itself_is_stopped_and_that_is_said(
    cli: Cli, stored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_cli.engine.core.sequence_output.repeats_itself", lambda ids: len(ids) == 8)
    ask = ("ask", "who?", "--chunks", stored[0], "--max-tokens", "12")
    assert (
        "the answer repeated itself and was stopped; cacheblend config set stop_repetition false turns this off"
        in cli(*ask).err
    )
    [record] = cli(*ask, "--json").records
    assert record["finish_reason"] == "repetition"
    monkeypatch.setenv("CACHEBLEND_STOP_REPETITION", "false")
    assert "repeated" not in cli(*ask).err


def test_the_default_model_is_said_to_be_small_once_on_a_terminal(
    cli: Cli, stored: list[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CACHEBLEND_MODEL")
    monkeypatch.setattr("cacheblend_cli.model.named.smollm2_file", lambda: model)
    asked = ("ask", "who?", "--chunks", stored[0], "--max-tokens", "2")
    assert FALLBACK_NOTE not in cli(*asked).err, "not in a pipe"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for flags in (("-q",), ("--json",), ("--model", str(model))):
        assert FALLBACK_NOTE not in cli(*asked, *flags).err
    assert cli(*asked).err.count(FALLBACK_NOTE) == 1
    assert FALLBACK_NOTE not in cli(*asked).err
