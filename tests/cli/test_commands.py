"""The command line as a user meets it: answers on stdout, everything else on stderr, the exit codes of the contract."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bare_store import bare_writing
from cacheblend_store import ChunkStore
from checkpoints import write_checkpoint
from safetensors.torch import load_file

Cli = Callable[..., Any]


def test_ask_json_has_the_keys_of_the_contract(cli: Cli, stored: list[str]) -> None:
    result = cli(
        "ask",
        "who leads billing?",
        "--chunks",
        ",".join(stored[:3]),
        "--json",
        "--verify",
        "--ids",
        "--max-tokens",
        "4",
        "--logprobs",
        "2",
    )
    assert result.code == 0, result.err
    [answer] = result.records
    assert set(answer) >= {
        "schema_version", "answer", "finish_reason", "model", "mode", "selector", "ratio", "prompt_tokens", "cached_tokens", "exact_tokens",
        "recomputed_tokens", "recompute_fraction", "generated_tokens", "chunks", "timing", "kv_bytes_loaded", "verify",
        "prompt_ids", "generated_ids",
    }  # fmt: skip
    assert set(answer["timing"]) == {
        "process_s",
        "model_load_s",
        "kv_load_s",
        "kv_load_stall_s",
        "prefill_s",
        "ttft_s",
        "decode_tokens_per_s",
        "full_ttft_s",
    }
    assert set(answer["verify"]) == {
        "kl", "top1_agree", "full_ttft_s", "answer_kl", "answer_top1", "answer_tokens", "same_answer", "first_difference",
    }  # fmt: skip
    assert [c["status"] for c in answer["chunks"]] == ["exact", "blended", "blended"]
    assert [c["id"] for c in answer["chunks"]] == stored[:3]
    assert len(answer["prompt_ids"]) == answer["prompt_tokens"]
    assert answer["kv_bytes_loaded"] > 0
    assert len(answer["logprobs"][0]["top"]) == 2


def test_answer_is_on_stdout_and_the_rest_on_stderr(cli: Cli, stored: list[str]) -> None:
    asked = cli("ask", "who?", "--chunks", stored[0][:12], "--max-tokens", "5", "--json").records[0]
    plain = cli("ask", "who?", "--chunks", stored[0][:12], "--max-tokens", "5")
    assert plain.out == asked["answer"] + "\n"
    assert plain.err


def test_search_feeds_ask(cli: Cli, stored: list[str]) -> None:
    found = cli("search", "alpha", "-q")
    assert found.code == 0
    assert set(found.out.split()) <= set(stored)
    answer = cli("ask", "alpha?", "--chunks", "-", "--max-tokens", "2", "--json", stdin=found.out).records[0]
    assert [c["id"] for c in answer["chunks"]] == found.out.split()


def test_search_takes_as_many_as_ask(cli: Cli, stored: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """top_k: flag over environment over file."""
    assert len(cli("search", "alpha beta", "-q").out.split()) == 5
    Path("cacheblend.toml").write_text("top_k = 3\n")
    assert len(cli("search", "alpha beta", "-q").out.split()) == 3
    monkeypatch.setenv("CACHEBLEND_TOP_K", "2")
    assert len(cli("search", "alpha beta", "-q").out.split()) == 2
    assert len(cli("search", "alpha beta", "-q", "-k", "1").out.split()) == 1


def test_missing_chunks_of_another_model_keep_their_places(
    cli: Cli, stored: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = sorted(cli("chunks", "ls", "--json").records, key=lambda r: (r["source"], r["index"]))
    of_alpha = [r for r in listed if r["source"] == "docs/alpha.md"]
    assert len(of_alpha) > 1
    write_checkpoint(tmp_path / "other", "llama-gqa", seed=7)
    monkeypatch.setenv("CACHEBLEND_MODEL", str(tmp_path / "other"))
    ids = [r["id"] for r in of_alpha]
    named = cli("ask", "alpha?", "--chunks", ",".join(ids), "--max-tokens", "2", "--json")
    assert {c["status"] for c in named.records[0]["chunks"]} == {"computed"}
    found = cli("ask", "alpha?", "--top-k", "9", "--max-tokens", "2", "--json").records[0]["chunks"]
    assert [c["id"] for c in found] == [c["id"] for c in named.records[0]["chunks"]], "in reading order"
    with ChunkStore.open(tmp_path / "store") as store:
        theirs, ours = ([store.get_chunk(bytes.fromhex(i)) for i in of] for of in (ids, [c["id"] for c in found]))
    assert [(m.text, m.index, m.span) for m in ours] == [(m.text, m.index, m.span) for m in theirs]


def test_ask_without_chunks_searches(cli: Cli, stored: list[str]) -> None:
    answer = cli("ask", "what does beta say?", "--top-k", "2", "--max-tokens", "2", "--json").records[0]
    assert len(answer["chunks"]) == 2
    assert all(c["source"] == "docs/beta.md" for c in answer["chunks"])


def test_batch_answers_each_line(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(
        json.dumps({"question": "one?", "chunks": stored[:1]}) + "\n" + json.dumps({"question": "beta?"}) + "\n"
    )
    answers = cli("ask", "--batch", "q.jsonl", "--max-tokens", "2", "--json").records
    assert len(answers[0]["chunks"]) == 1
    assert len(answers) == 2


def test_dry_run_of_ask(cli: Cli, stored: list[str]) -> None:
    ask = ("ask", "one?", "--chunks", ",".join(stored[:2]), "--dry-run")
    [plan] = cli(*ask, "--json").records
    assert plan["cached_tokens"] > plan["exact_tokens"] > 0
    told = re.findall(r"(\d+) (?:prompt|cached|before|fresh)", cli(*ask).out)
    assert [int(told[0]), int(told[1])] == [plan["prompt_tokens"], plan["cached_tokens"]]
    assert sum(map(int, told[1:])) == plan["prompt_tokens"]  # what is said adds up


def test_a_dry_run_refuses_what_ask_refuses(cli: Cli, stored: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, layer in (("--max-tokens", "2000"), "1"), (("--selector", "hkvd"), "9"):
        monkeypatch.setenv("CACHEBLEND_CHECK_LAYER", layer)
        asked, planned = (
            cli("ask", "one?", "--chunks", ",".join(stored), *flags, *dry) for dry in ((), ("--dry-run",))
        )
        assert (planned.code, planned.err) == (asked.code, asked.err) == (2, asked.err)
        assert planned.out == ""


def test_a_dry_run_knows_the_bytes_of_every_codec(cli: Cli, docs: Path) -> None:
    ids = []
    for name, codec in (("alpha", "exact"), ("beta", "int4")):
        ids += cli("precompute", f"docs/{name}.md", "--kv-dtype", codec, "-q").out.split()
    flags = ("ask", "one?", "--chunks", ",".join(ids), "--json", "--max-tokens", "1")
    [plan], [answer] = cli(*flags, "--dry-run").records, cli(*flags).records
    assert plan["kv_bytes"] == answer["kv_bytes_loaded"] > 0
    assert [c["status"] for c in answer["chunks"]] == [c["status"] for c in plan["chunks"]] == ["exact", "blended"]


def test_a_full_prefill_is_all_of_the_work(cli: Cli, stored: list[str]) -> None:
    [answer] = cli("ask", "one?", "--chunks", stored[0], "--mode", "full", "--json", "--max-tokens", "1").records
    assert answer["recompute_fraction"] == 1
    [answer] = cli("ask", "one?", "--chunks", stored[0], "--json", "--max-tokens", "1").records
    assert answer["recompute_fraction"] == 0


def test_a_corrupt_blob_is_reported_computed_and_replaced(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    good = cli(
        "ask", "who?", "--chunks", ",".join(stored[:3]), "--mode", "full", "--max-tokens", "6", "--json"
    ).records[0]
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        key = bytes.fromhex(stored[1])
        with bare_writing(store) as (txn, dbs):
            name = key + (1).to_bytes(4, "big")
            blob = bytearray(txn.get(name, db=dbs["blobs"]))
            blob[-7] ^= 1
            txn.put(name, bytes(blob), db=dbs["blobs"])
    result = cli("ask", "who?", "--chunks", ",".join(stored[:3]), "--ratio", "1", "--max-tokens", "6", "--json")
    assert result.code == 0
    assert stored[1][:12] in result.err
    assert result.records[0]["answer"] == good["answer"]
    assert [c["status"] for c in result.records[0]["chunks"]] == ["exact", "computed", "blended"]
    again = cli("ask", "who?", "--chunks", ",".join(stored[:3]), "--max-tokens", "2", "--json")
    assert [c["status"] for c in again.records[0]["chunks"]] == ["exact", "blended", "blended"]


def test_another_models_chunks_are_computed_and_then_stored(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", "qwen3")
    ask = (
        "ask",
        "who?",
        "--chunks",
        ",".join(stored[:2]),
        "--model",
        str(tmp_path / "other"),
        "--max-tokens",
        "2",
        "--json",
    )
    assert [c["status"] for c in cli(*ask).records[0]["chunks"]] == ["computed", "computed"]
    assert [c["status"] for c in cli(*ask).records[0]["chunks"]] == ["exact", "blended"]


def test_ask_takes_the_codec_the_chunks_were_stored_in(cli: Cli, docs: Path) -> None:
    ids = [
        r["id"]
        for r in cli(
            "precompute", "docs", "--chunk-tokens", "40", "--kv-dtype", "int4", "--context", "sink", "--json"
        ).records
    ]
    named = cli("ask", "alpha?", "--chunks", ",".join(ids[:2]), "--max-tokens", "2", "--json").records[0]
    assert [c["status"] for c in named["chunks"]] == ["exact", "blended"]
    found = cli("ask", "alpha?", "--max-tokens", "2", "--json").records[0]
    assert {c["status"] for c in found["chunks"]} == {"exact", "blended"}


def test_chunks_show_and_rm(cli: Cli, stored: list[str]) -> None:
    shown = cli("chunks", "show", stored[0][:10], "--json").records[0]
    assert shown["id"] == stored[0]
    assert shown["text"].startswith("# alpha")
    [removed] = cli("chunks", "rm", stored[0][:10], stored[0], "--json").records
    assert removed == {"removed": 1, "ids": [stored[0]], "forgotten": []}
    assert cli("chunks", "show", stored[0]).code == 3
    statuses = [r["status"] for r in cli("precompute", "docs", "--chunk-tokens", "40", "--json").records]
    assert sum(s != "unchanged" for s in statuses) == 1
    of_beta = cli("chunks", "ls", "--source", "*beta*", "-q").out.split()
    assert sorted(cli("chunks", "rm", "--source", "docs/beta.md", "-q").out.split()) == sorted(of_beta)
    left = cli("chunks", "ls", "--json").records
    assert {r["source"] for r in left} == {"docs/alpha.md"}
    result = cli("chunks", "rm", "--all", "--yes")
    assert f"{len(left)} chunks" in result.err  # what ls listed; the prefix goes as well
    assert cli("chunks", "stats", "--json").records[0]["chunks"] == 0


def test_chunks_are_listed_page_by_page(cli: Cli, stored: list[str]) -> None:
    everything = [r["id"] for r in cli("chunks", "ls", "--json").records]
    pages, after = [], ()
    while page := [r["id"] for r in cli("chunks", "ls", "--json", "--limit", "2", *after).records]:
        assert len(page) <= 2
        pages += page
        after = ("--after", page[-1][:16])
    assert pages == everything
    assert "--after" in cli("chunks", "ls", "--limit", "1").err
    nothing = cli("chunks", "ls", "--source", "gamma")
    assert (nothing.code, nothing.out) == (0, "")
    assert cli("chunks", "ls", "--after", "zz").code == 3


def test_config_show_names_the_origin(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "cacheblend.toml").write_text("chunk-tokens = 77\n")
    shown = cli("config", "show", "--json").records[0]
    assert shown["chunk_tokens"] == {"value": 77, "from": str(tmp_path / "cacheblend.toml")}
    assert shown["store"]["from"] == "CACHEBLEND_STORE"
    (tmp_path / "cacheblend.toml").write_text("chunk_token = 77\n")
    failed = cli("config", "show")
    assert failed.code == 2
    assert "chunk_token" in failed.err


def test_doctor(cli: Cli, stored: list[str], model: Path) -> None:
    [facts] = cli("doctor", "--json").records
    assert facts["ok"] is True
    assert facts["store"]["chunks"] == len(stored)
    assert facts["model"]["architecture"] == "Qwen2ForCausalLM"
    tensors = load_file(model / "model.safetensors")
    assert facts["model"]["parameters"] == sum(t.numel() for t in tensors.values()), "a tied head is counted once"
    assert facts["backends"]["torch"] == "runs"
    assert facts["backends"]["auto"] == facts["model"]["attention_backend"]
    if facts["device"]["used"] == "cpu":
        assert facts["device"]["cuda"].startswith("none: ")
        assert facts["backends"]["triton"].startswith("does not run: ")
        assert facts["backends"]["xformers"].startswith("not tried: ")
        [broken] = cli("doctor", "--json", "--device", "cuda").records  # what works is shown all the same
        assert "CUDA" in broken["device"]["error"]
        assert broken["store"] == facts["store"]
        assert cli("doctor", "--device", "cuda").code == 5
    assert cli("doctor", "--model", "nowhere/at/all").code == 3


def test_doctor_calls_no_damaged_store_well(cli: Cli, stored: list[str], tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store", mode="write") as store, bare_writing(store) as (txn, dbs):
        record = bytearray(txn.get(bytes.fromhex(stored[1]), db=dbs["chunks"]))
        record[len(record) // 2] ^= 1
        txn.put(bytes.fromhex(stored[1]), bytes(record), db=dbs["chunks"])
    result = cli("doctor", "--json")
    assert result.code == 4
    [facts] = result.records
    assert (facts["ok"], facts["store"]["damaged"]) == (False, 1)
    assert facts["model"]["architecture"] == "Qwen2ForCausalLM"  # what works is shown all the same
    assert "chunks verify --repair" in result.err
    assert "failed checks: 1" in cli("doctor").out
    assert cli("chunks", "verify", "--repair").code == 0
    whole = cli("doctor")
    assert whole.code == 0
    assert "no quota" in whole.out
    assert "KiB" in whole.out


BAD = [
    (("ask",), 2),
    (("ask", "  "), 2),
    (("ask", "q", "--chunks", "ffffffffff"), 3),
    (("ask", "q", "--chunks", "zz"), 3),
    (("ask", "q", "--selector", "best"), 2),
    (("ask", "q", "--mode", "fast"), 2),
    (("ask", "q", "--ratio", "2"), 2),
    (("ask", "q", "--temperature", "-1"), 2),
    (("ask", "q", "--max-tokens", "x"), 2),
    (("ask", "q", "--chunks", "-", "--batch", "none.jsonl"), 2),
    (("ask", "--batch", "none.jsonl"), 3),
    (("ask", "-", "--chunks", "-"), 2),
    (("ask", "q " * 600, "--top-k", "1"), 2),
    (("precompute", "docs", "--attention-backend", "magic"), 2),
    (("ask", "q", "--device", "abacus"), 2),
    (("precompute", "docs", "--force", "--device", "cpu", "--attention-backend", "triton"), 5),
    (("precompute", "nowhere"), 3),
    (("precompute", "docs", "--chunk-tokens", "0"), 2),
    (("precompute", "docs", "--chunk-tokens", "9999"), 2),
    (("precompute", "docs", "--kv-dtype", "int2"), 2),
    (("precompute", "docs", "--context", "moon"), 2),
    (("search", "alpha", "-k", "0"), 2),
    (("ask", "q", "--seed", "1" + "0" * 20), 2),
    (("ask", "q", "--seed", "-" + "1" * 20), 2),
    (("precompute", "docs", "--threads", "5000"), 2),
    (("precompute", "docs", "--chunk-tokens", "1" + "0" * 20), 2),
    (("precompute", "docs", "--window", "1" + "0" * 20), 2),
    (("search", " "), 2),
    (("search", "\udcff"), 2),
    (("ask", "\udcff"), 2),
    (("ask", "q", "--system", "\udcff"), 2),
    (("models", "ls", "nowhere"), 3),
    (("search", "qqqqzzz"), 3),
    (("chunks", "rm"), 2),
    (("chunks", "ls", "--store", "nowhere"), 3),
    (("frobnicate",), 2),
    (("ask", "--frobnicate"), 2),
]  # fmt: skip


def test_bad_input_gets_the_right_code(cli: Cli, stored: list[str]) -> None:
    for arguments, code in BAD:
        if arguments[0] == "ask" and len(arguments) > 1 and "--chunks" not in arguments and "q" in arguments[1]:
            arguments = (arguments[0], arguments[1].replace("q", "alpha"), *arguments[2:])
        result = cli(*arguments)
        assert (result.code, result.out) == (code, ""), (arguments, result.err)
        assert "Traceback" not in result.err, arguments
    assert len(cli("chunks", "ls", "--json").records) == len(stored)


def test_a_missing_cuda_device_is_a_device_error(cli: Cli, stored: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = cli("ask", "alpha", "--device", "cuda")
    assert result.code == 5


def test_an_ambiguous_id_is_not_found(cli: Cli, docs: Path) -> None:
    for i in range(40):
        (docs / f"n{i}.md").write_text(f"note number {i}\n")
    ids = [r["id"] for r in cli("precompute", "docs", "--json").records]
    first = next(a[0] for a in ids if sum(b[0] == a[0] for b in ids) > 1)
    result = cli("chunks", "show", first)
    assert result.code == 3


def test_a_bad_model_directory(cli: Cli, stored: list[str], model: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "config.json").write_text((model / "config.json").read_text())
    (bad / "tokenizer.json").write_text((model / "tokenizer.json").read_text())
    ask = ("ask", "alpha", "--model", str(bad))
    result = cli(*ask)
    assert result.code == 3
    (bad / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    config = json.loads((model / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps({**config, "intermediate_size": 100}))
    result = cli(*ask)
    assert result.code == 2
    (bad / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    result = cli(*ask)
    assert result.code == 2
    (bad / "config.json").write_text(json.dumps(config))
    (bad / "model.safetensors").write_bytes(b"\x10" * 40)
    assert cli(*ask).code == 2


def test_help_and_listing_import_nothing_heavy(tmp_path: Path, stored: list[str]) -> None:
    heavy = "('torch', 'numpy', 'transformers', 'pydantic', 'obstore', 'cryptography')"
    for arguments in (["--help"], ["--version"], ["chunks", "ls", "--store", str(tmp_path / "store")]):
        code = (
            f"import sys; from cacheblend_cli.cli.main import run; code = run({arguments!r});"
            f"sys.stderr.write(repr((code, [m for m in {heavy} if m in sys.modules])))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert done.stderr.endswith("(0, [])"), done.stderr


def test_a_closed_pipe_is_quiet(stored: list[str], tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'from cacheblend_cli.cli.main import main; main()' chunks ls --json --store {tmp_path / 'store'} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert len(done.stdout.splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert "error" not in done.stderr


def test_control_characters_are_shown_on_a_terminal_only() -> None:
    from cacheblend_cli.cli.output import Output, visible

    assert visible("a\x1b[31mb\tc\n") == "a\u241b[31mb\tc\n"
    pipe = io.StringIO()
    Output(pipe, io.StringIO()).text("\x1b[31m")
    assert pipe.getvalue() == "\x1b[31m\n"


def test_an_answer_is_not_lost_with_its_page(cli: Cli, stored: list[str]) -> None:
    result = cli("ask", "alpha?", "--chunks", stored[0], "--max-tokens", "2", "--json", "--html", "docs")
    assert result.code == 2
    assert "docs" in result.err
    assert result.records[0]["generated_tokens"] == 2
