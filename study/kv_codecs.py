"""What codecs of stored KV cost: KL of full prefill's own KV stored in a codec and loaded again, and of blended
answers.

    python study/kv_codecs.py --data FOLDER --questions 30 --out FILE     # full prefill's KV, in float32
    python study/kv_codecs.py --data FOLDER --questions 30 --blended --dtype bfloat16  # the default at .15
    python study/kv_codecs.py --data FOLDER --questions 30 --set needles-2k --model FILE    # --model is repeatable

Questions are those of the test half of a set of study/README.md; models take turns question by question, so that an
interrupted run has as many of each. Each measurement is added to a file of records, and a later run goes on from there,
unless the codecs' version changed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cacheblend_kernels.torch_backend import dequantized
from cacheblend_store import ChunkStore
from cacheblend_store.format.blobs import blob_size, blob_spec
from cacheblend_store.format.codecs import coded
from cacheblend_store.format.keys import CODEC_VERSION
from results import CORRECTION, digits, hardware, write_result
from sets import study_sets

from cacheblend_cli.blend.corrections import old_kv
from cacheblend_cli.blend.fidelity import Divergence, divergence, log_distribution, teacher_forced
from cacheblend_cli.collect.collector import Collector, PlannedChunk
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.evaluation.bootstrap import Bootstrap, difference, mean
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.samples import Sample
from cacheblend_cli.kv.forward import write_kv
from cacheblend_cli.kv.rows import rows_of
from cacheblend_cli.kv.stored_prompt import stored_kv
from cacheblend_cli.prompt.collection import Collection
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

CODECS = ("int7", "int4")
EXACT = "exact"
"""Stored in the compute dtype."""
TOKENS = {"musique": 48, "needles-2k": 16}
"""Of full prefill's answer, over which KL is measured."""
Found = dict[str, Divergence]


@torch.no_grad()
def restored(engine: Engine, store: ChunkStore, sample: Sample, tokens: int, codecs: Sequence[str]) -> Found:
    """Return the divergence of full prefill's own KV of the chunks, coded and decoded, by codec. The rows of the
    question are computed again over it."""
    runtime, decoder = engine.runtime, engine.runtime.decoder
    collection = runtime.collection(day=runtime.day(store))
    chunks = planned(collection, sample)
    Collector(collection, store).store_texts(chunks)
    request = resolve(runtime, store, AskRequest(sample.question, [c.key for c in chunks])).in_full()
    done = prefill(runtime, request, headroom=tokens)
    sequence, ids = done.sequence, list(done.plan.token_ids)
    answer, reference = answered(done, tokens)
    spans = [torch.arange(s.start, s.end) for s in done.plan.chunks]
    rows = [rows_of(decoder, sequence, span, len(ids), len(ids)) for span in spans]
    own = [layer for layer in decoder.layers if layer.own_kv]
    kept = [[old_kv(layer, of) for of in rows] for layer in own]
    start, found = done.plan.segments[-1].start, dict[str, Divergence]()
    for codec in codecs:
        for layer, chunks in zip(own, kept, strict=True):
            for of, (k, v) in zip(rows, chunks, strict=True):
                dims = k.shape[-1], v.shape[-1]
                write_kv(layer, *dequantized(stored_kv(codec, coded(k, v, codec), *dims), *dims), of)
        logits = teacher_forced(decoder, sequence, ids[:start], [*ids[start:], *answer])
        found[codec] = divergence(reference, log_distribution(logits[-len(answer) :]))
    sequence.release()
    return found


@torch.no_grad()
def blended(engine: Engine, store: ChunkStore, sample: Sample, tokens: int, codecs: Sequence[str]) -> Found:
    """Return the divergence of the default at .15 over chunks collected alone and stored in each codec, and of plain
    reuse."""
    runtime, decoder = engine.runtime, engine.runtime.decoder
    chunks = SampleChunks(engine, store, [sample])
    chunks.store([sample], ["sink"])
    request = engine.resolve(store, AskRequest(sample.question, chunks.keys(sample, "sink")))
    done = prefill(runtime, request.in_full(), headroom=tokens)
    answer, reference = answered(done, tokens)
    done.sequence.release()
    found = dict[str, Divergence]()
    runtimes = {codec: Runtime(engine.model, replace(engine.config, kv_dtype=codec)) for codec in codecs}
    for codec, of in {EXACT: runtime, **runtimes}.items():
        keys = stored(of, store, sample)
        asked = resolve(of, store, AskRequest(sample.question, keys))
        for name, blend in {"": BlendParams(), "reuse ": BlendParams(mode="reuse")}.items():
            if name and codec != EXACT:
                continue
            done = prefill(of, replace(asked, blend=blend), headroom=tokens)
            logits = teacher_forced(decoder, done.sequence, done.plan.token_ids, answer)
            found[name + codec] = divergence(reference, log_distribution(logits))
            done.sequence.release()
    return found


def answered(done: Any, tokens: int) -> tuple[list[int], torch.Tensor]:
    """Return the ids of a prompt's greedy answer, and fp64 log-probabilities for each of them [num_tokens,
    vocab_size]."""
    params = SamplingParams(max_tokens=tokens, stop_repetition=False)
    ids = done.answer(params).token_ids
    logits = done.predict(ids)
    return ids, log_distribution(logits)


def planned(collection: Collection, sample: Sample) -> list[PlannedChunk]:
    """Return the sample's chunks, each alone."""
    encode = collection.model.tokenizer.encode_text
    chunks = [Chunk(0, c.text, tuple(encode(c.text)), 0, len(c.text)) for c in sample.contexts]
    return [PlannedChunk(collection.key(c.token_ids), "(sample)", c, (), "sink") for c in chunks]


def stored(runtime: Runtime, store: ChunkStore, sample: Sample) -> list[bytes]:
    """Store the sample's chunks in the runtime's codec, if they are not there. Returns their keys."""
    collection = runtime.collection(day=runtime.day(store))
    chunks = planned(collection, sample)
    missing = {p.key: p for p in chunks if not store.has_kv(p.key)}
    list(Collector(collection, store).store(list(missing.values())))
    return [p.key for p in chunks]


class Records:
    """Divergences by model, question and codec, in a file of JSON lines that a later run goes on from."""

    def __init__(self, path: Path, **setting: Any) -> None:
        self._path, self._setting = path, setting
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else [])
        self.rows = [row for row in rows if {**row, **setting} == row]

    def of(self, model: str, question: str) -> dict[str, Any]:
        """Return what was measured of a question, by codec."""
        return {row["codec"]: row for row in self.rows if (row["model"], row["question"]) == (model, question)}

    def add(self, model: str, question: str, found: Found) -> None:
        with self._path.open("a", encoding="utf-8") as stream:
            for codec, d in found.items():
                kl = [float(f"{x:.6g}") for x in d.kl]
                row = {
                    **self._setting,
                    "model": model,
                    "question": question,
                    "codec": codec,
                    "kl": kl,
                    "top1": list(d.top1),
                }
                self.rows.append(row)
                stream.write(json.dumps(row) + "\n")


def figures(rows: Sequence[dict[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """Return a row per codec over the questions that have it: KL with 95 % intervals over the questions, its difference
    from that of `baseline` on the same questions, and the share of answers with the same first 16 tokens."""
    by: dict[str, dict[str, Any]] = {}
    for row in rows:
        by.setdefault(row["codec"], {})[row["question"]] = row
    out = []
    for codec in sorted(by, key=[baseline, f"reuse {baseline}", *CODECS].index):
        of_all = list(by[codec].values())
        kl, bootstrap = [statistics.fmean(row["kl"]) for row in of_all], Bootstrap(len(of_all))
        found: dict[str, Any] = {"codec": codec, "questions": len(of_all), "kl": digits(bootstrap.interval(mean, kl))}
        if baseline in by and codec != baseline:
            exact = [statistics.fmean(by[baseline][question]["kl"]) for question in by[codec]]
            found["minus_exact"] = digits(bootstrap.interval(difference, kl, exact))
        found["same"] = round(statistics.fmean(all(row["top1"][:16]) for row in of_all), 4)
        out.append(found)
    return out


def bits(engine: Engine, codec: str) -> float:
    """Return bits per value of K and V of a chunk of 512 tokens."""
    shapes = engine.model.spec.kv_shapes
    numbers = sum(512 * heads * (dims[0] + dims[-1]) for heads, *dims in shapes)
    return round(8 * sum(blob_size(blob_spec(codec, 512, *shape)) for shape in shapes) / numbers, 2)


def turns(engines: dict[str, Engine], samples: Sequence[Sample]) -> Iterator[tuple[str, Engine, Sample]]:
    for sample in samples:
        for name, engine in engines.items():
            yield name, engine, sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with musique_dev.json")
    parser.add_argument("--model", action="append", help="repeatable (smollm2)")
    parser.add_argument("--set", choices=sorted(TOKENS), default="musique")
    parser.add_argument("--blended", action="store_true")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--questions", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after the question measured then")
    parser.add_argument("--records", type=Path, default=Path(__file__).parent / "records" / "kv_codecs.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="file of the result")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    samples = study_sets()[arguments.set].samples(arguments.data)[1::2][: arguments.questions]
    setting = {"set": arguments.set, "blended": arguments.blended, "dtype": arguments.dtype, "version": CODEC_VERSION}
    if arguments.blended:
        setting["correction"] = CORRECTION
    records = Records(arguments.records, **setting)
    engines = {
        Path(name).stem: Engine.load(
            EngineConfig(model=name, dtype=arguments.dtype, kv_dtype=EXACT, threads=arguments.threads)
        )
        for name in arguments.model or ["smollm2"]
    }
    measure = blended if arguments.blended else restored
    for name, engine, sample in turns(engines, samples):
        missing = [codec for codec in CODECS if codec not in records.of(name, sample.digest)]
        if missing and time.monotonic() < until:
            with (
                tempfile.TemporaryDirectory(prefix="cacheblend-study-") as folder,
                ChunkStore.open(Path(folder) / "store", mode="write") as store,
            ):
                begin = time.monotonic()
                records.add(name, sample.digest, measure(engine, store, sample, TOKENS[arguments.set], missing))
                print(f"  {name}, {sample.digest}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
            report(arguments.out, setting, engines, samples, records)
    report(arguments.out, setting, engines, samples, records)


def report(
    out: Path, setting: dict[str, Any], engines: dict[str, Engine], samples: Sequence[Sample], records: Records
) -> None:
    """Write the figures of each model over these samples."""
    wanted = {s.digest for s in samples}
    of = {m: figures([r for r in records.rows if r["model"] == m and r["question"] in wanted], EXACT) for m in engines}
    sizes = {m: {codec: bits(e, codec) for codec in CODECS} for m, e in engines.items()}
    write_result(out, {**setting, "hardware": hardware(), "bits_per_value": sizes, **of})


if __name__ == "__main__":
    main()
