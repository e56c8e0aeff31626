"""Stored KV in fewer bits, together with blending: the error of each alone, and of both.

    python benchmarks/compression.py --data FILE [--model smollm2] [--limit 12] [--contexts 4] [--records FILE] [--out FILE.md]

*Codec alone*: the prompt's chunks are collected as one page, in order, so that nothing of them needs repair, and reused. The
others are collected each by itself: *reuse* and blending err in a lossless codec too, by what the chunks do not know of one
another. Every prompt is compared with a full prefill of the same token ids. Writes benchmarks/results/compression.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cacheblend_store import ChunkStore

from cacheblend_cli.api import BlendConfig, Engine, EngineConfig
from cacheblend_cli.collect.settings import CollectSettings
from cacheblend_cli.evaluation.evaluate import EvaluateOptions, evaluate
from cacheblend_cli.evaluation.records import RecordFile
from cacheblend_cli.evaluation.samples import Sample, pages, read_samples
from cacheblend_cli.evaluation.settings import Setting
from cacheblend_cli.evaluation.summary import Summary, summarise

ROOT = Path(__file__).parent.parent
CODECS = ("auto", "float8_e4m3", "int8", "int4")
REUSE = BlendConfig(mode="reuse")
ALONE = [Setting("codec alone", REUSE, "document"), Setting("reuse", REUSE)]


def one_page(sample: Sample) -> Sample:
    """The sample whose chunks are one page: in the context `document`, in this order, they are exact."""
    texts = [c.text for c in sample.contexts]
    return replace(sample, contexts=pages(["page"] * len(texts), texts))


def compression(
    config: EngineConfig, samples: Sequence[Sample], settings: Sequence[Setting], options: EvaluateOptions
) -> tuple[float, list[Summary]]:
    """config.kv_dtype: the codec. Bytes of KV a token, and a summary of `ALONE` and of every setting."""
    engine = Engine.load(config)
    window = engine.runtime.collection().window(sys.maxsize)
    options = replace(options, collecting=CollectSettings(window=window))
    with (
        tempfile.TemporaryDirectory(prefix="cacheblend-compression-") as folder,
        ChunkStore.open(Path(folder) / "store", mode="write") as store,
    ):
        results = evaluate(engine, store, [one_page(s) for s in samples], [*ALONE, *settings], options)
    assert all(r.exact_tokens == r.cached_tokens for r in results.by_label["codec alone"]), "a prompt beyond the window"
    return engine.runtime.collection().chunk_bytes(1024) / 1024, summarise(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--limit", type=int, default=12, help="the first questions of even number only")
    parser.add_argument("--contexts", type=int, default=4, help="of each question, the first")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--records", type=Path, default=None, help="keep records here, and go on from them")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/compression.md")
    arguments = parser.parse_args()
    samples = read_samples(arguments.data)[::2][: arguments.limit]
    samples = [replace(s, contexts=s.contexts[: arguments.contexts]) for s in samples]
    settings = [Setting(f"blend {arguments.ratio:g}", BlendConfig(ratio=arguments.ratio))]
    lines = [
        "# Stored KV in fewer bits, with blending\n",
        f"{arguments.model} in float32, {len(samples)} MuSiQue questions over {arguments.contexts} passages, {arguments.tokens} answer tokens,",
        "against a full prefill of the same ids. By `benchmarks/compression.py`.\n",
        "| codec | KiB a token | setting | KL | top-1 | same answer |\n|---|---|---|---|---|---|",
    ]
    with RecordFile(arguments.records) as records:
        for codec in CODECS:
            config = EngineConfig(model=arguments.model, dtype="float32", kv_dtype=codec)
            size, found = compression(config, samples, settings, EvaluateOptions(arguments.tokens, records))
            for s in found[1:]:
                assert s.kl
                assert s.top1
                assert s.same_answer
                lines.append(
                    f"| {codec} | {size / 1024:.1f} | {s.label} | {s.kl.value:.2g} | {s.top1.value:.1%} | "
                    f"{s.same_answer.value:.0%} |"
                )
            arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
