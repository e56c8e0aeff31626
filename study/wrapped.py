"""Measure trained wrappers (`wrappers.py`) in the engine, on held-out MuSiQue questions over whole passages: what
`wrappers.md` reports.

    python study/wrapped.py --data FOLDER --wrappers RUN/soft-8+8.safetensors --out RESULT.json

Soft tokens are ids behind the vocabulary, so that collect, the store, the selector and the correction treat them as any
token; they are never chosen for recomputation and never moved. Every setting is compared with one full prefill of the
prompt without wrappers, over 64 tokens of its answer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from cacheblend_store import ChunkStore
from results import CORRECTION
from sets import musique
from torch import Tensor
from wrapped_prompts import Wrappers

from cacheblend_cli.blend.corrections import CORRECTIONS, Regression
from cacheblend_cli.blend.evidence import BeforeLayers
from cacheblend_cli.blend.fidelity import divergence, log_distribution
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import SELECTORS, Candidates, Evidence, QueryAttention
from cacheblend_cli.collect.prefill import ChunkKV, CollectSequence, Kept, PrefixKV, collect
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine, Request
from cacheblend_cli.evaluation.bootstrap import Bootstrap, difference, mean
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.measures import AnswerLengths, Measured, run_full
from cacheblend_cli.evaluation.samples import Context, Sample
from cacheblend_cli.types import AskRequest, BlendParams

TOKENS = 64
DEFAULT = "default 0.15"
"""Setting that others are compared with."""


def inner(prompt: Prompt, candidates: Candidates) -> Tensor:
    """Return which candidates are tokens of the text, bool [n]."""
    return prompt.token_ids[candidates.positions] < prompt.decoder.spec.vocab_size


class InnerQuery(QueryAttention):
    """`query`, for tokens of the text only."""

    def scores(self, candidates: Candidates, evidence: Evidence) -> Tensor:
        assert isinstance(evidence, BeforeLayers)
        return super().scores(candidates, evidence).masked_fill(~inner(evidence.prompt, candidates), -1)


class InnerRegression(Regression):
    """`regression`, which leaves soft tokens as they are."""

    def __init__(self, prompt: Prompt, every: Candidates, repaired: Candidates) -> None:
        super().__init__(prompt, every.take(inner(prompt, every).nonzero()[:, 0]), repaired)


class WrappedChunks(SampleChunks):
    """Chunks of samples with header and trailer ids around each. first: id of the first soft token."""

    def __init__(
        self, engine: Engine, store: ChunkStore, samples: Sequence[Sample], wrappers: Wrappers, first: int
    ) -> None:
        super().__init__(engine, store, samples)
        num_header, num_trailer = wrappers.num_tokens
        dtype = engine.model.decoder.dtype
        ids = tuple(range(first, first + num_header + num_trailer))
        self._engine, self._header, plain = engine, ids[:num_header], self._encode
        self._encode = cache(lambda text: (*self._header, *plain(text), *ids[num_header:]))
        self._header_kv = wrappers.header.detach().to(dtype) if wrappers.is_deep else None

    def store(self, samples: Iterable[Sample], contexts: Sequence[str]) -> int:
        """Collect and store missing chunks; a deep header's K and V are the trained ones."""
        if self._header_kv is None:
            return super().store(samples, contexts)
        self._collector.begin()
        prefix, count = self._collector.prefix, len(self._header)
        keys, values = self._header_kv.unbind(1)
        k, v = (
            [torch.cat(pair) for pair in zip(old, new, strict=True)]
            for old, new in ((prefix.kv.k, keys), (prefix.kv.v, values))
        )
        behind = PrefixKV((*prefix.token_ids, *self._header), ChunkKV(b"", k, v))
        planned = [self._plan(c, context) for sample in samples for context in contexts for c in sample.contexts]
        missing = {p.key: p for p in planned if not self._store.has_kv(p.key)}
        for one in missing.values():
            ids = one.chunk.token_ids[count:]
            [kv] = collect(self._engine.model.decoder, behind, [CollectSequence(ids, (Kept(one.key, 0, len(ids)),))])
            kv.k, kv.v = (
                [torch.cat(pair) for pair in zip(head, own, strict=True)]
                for head, own in ((keys, kv.k), (values, kv.v))
            )
            self._collector.put(one, kv)
        return len(missing)


@contextmanager
def soft_tokens(engine: Engine, wrappers: Sequence[Wrappers]) -> Iterator[None]:
    """Embed the ids behind the vocabulary as the wrappers' tokens, in turn. Those of a deep header are never
    computed."""
    decoder, size = engine.model.decoder, engine.model.spec.vocab_size
    parts = [torch.zeros(1, engine.model.spec.hidden_size)]
    for one in wrappers:
        parts += [
            one.trailer.new_zeros(one.num_tokens[0], one.trailer.shape[1]) if one.is_deep else one.header,
            one.trailer,
        ]
    soft = torch.cat(parts).detach().to(decoder.dtype)
    embed = decoder.embed

    def of(ids: Tensor) -> Tensor:
        is_soft = ids >= size
        return torch.where(
            is_soft[:, None], F.embedding((ids - size + 1).clamp_min(0), soft), embed(ids.masked_fill(is_soft, 0))
        )

    with (
        patch.object(decoder, "embed", of),
        patch.dict(SELECTORS, {"inner-query": lambda seed: InnerQuery()}),
        patch.dict(CORRECTIONS, {"inner-regression": InnerRegression}),
    ):
        yield


Found = dict[str, float]
"""KL of one question by setting; a setting with wrappers has their name before it."""


def settings(selector: str, correction: str) -> dict[str, BlendParams]:
    """Reuse, and the selector without and with the correction, by name."""
    found = {"reuse": BlendParams(mode="reuse")}
    for name, of in (("query", "none"), ("default", correction)):
        found |= {f"{name} {r}": BlendParams(selector=selector, ratio=r, correction=of) for r in (0.05, 0.15)}
    return found


@torch.no_grad()
def distance(engine: Engine, request: Request, reference: Measured) -> float:
    """Return the mean KL over the reference's answer. The request's prompt may be longer than the reference's."""
    done = engine.hold_prefill(request, headroom=TOKENS)
    first = done.result.logits[-1:].clone()
    logits = done.predict(reference.answer_ids)
    done.sequence.release()
    return divergence(reference.log_p, log_distribution(torch.cat((first, logits[1:])))).mean_kl


def measure(
    engine: Engine, samples: Sequence[Sample], wrappers: Mapping[str, Wrappers], known: Sequence[Found] = ()
) -> Iterator[Found]:
    """Yield each sample's KL by setting. known: of the first samples, what was measured before."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ChunkStore.open(Path(folder) / "store", mode="write") as store,
        soft_tokens(engine, [*wrappers.values()]),
    ):
        plain, first = SampleChunks(engine, store, samples), engine.model.spec.vocab_size
        kinds: list[tuple[str, SampleChunks]] = [("", plain)]
        for name, soft in wrappers.items():
            kinds.append((f"{name}: ", WrappedChunks(engine, store, samples, soft, first)))
            first += sum(soft.num_tokens)
        for number, sample in enumerate(samples):
            found, reference = dict(known[number]) if number < len(known) else {}, None
            for kind, chunks in kinds:
                blends = settings("inner-query", "inner-regression") if kind else settings("query", "regression")
                missing = {kind + name: blend for name, blend in blends.items() if kind + name not in found}
                if not missing:
                    continue
                if reference is None:
                    request = resolved(engine, store, sample, plain)
                    reference = run_full(engine, request, AnswerLengths(TOKENS, TOKENS), 0.0)
                request = resolved(engine, store, sample, chunks)
                for name, blend in missing.items():
                    found[name] = distance(engine, replace(request, blend=blend), reference)
            yield found


def resolved(engine: Engine, store: ChunkStore, sample: Sample, chunks: SampleChunks) -> Request:
    """Collect the sample's chunks and lay its prompt out."""
    chunks.store([sample], ["sink"])
    return engine.resolve(store, AskRequest(sample.question, chunks.keys(sample, "sink")))


def shortened(engine: Engine, sample: Sample, num_tokens: int) -> Sample:
    """Return the sample with the first tokens of each passage."""
    tokenizer = engine.model.tokenizer
    texts = [tokenizer.decode(tokenizer.encode_text(c.text)[:num_tokens]) for c in sample.contexts]
    return replace(sample, contexts=tuple(Context(text) for text in texts))


@dataclass
class Figures:
    """What was measured before, in a file. setting: all that rows depend on but their wrappers; wrappers: a digest of
    each, by name."""

    path: Path
    setting: dict[str, Any]
    wrappers: dict[str, str]
    rows: list[Found]

    @classmethod
    def of(cls, path: Path, setting: dict[str, Any], wrappers: dict[str, str]) -> Figures:
        """Read the file, without the figures of wrappers that have changed since. Raises ValueError for a file of
        another setting."""
        if not path.exists():
            return cls(path, setting, wrappers, [])
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found["setting"] != setting:
            raise ValueError(f"{path} was measured with other settings: give another file")
        old = {name: digest for name, digest in found["wrappers"].items() if wrappers.get(name, digest) == digest}
        rows = [{k: kl for k, kl in row.items() if ": " not in k or k.split(": ")[0] in old} for row in found["rows"]]
        return cls(path, setting, old | wrappers, rows)

    def put(self, number: int, row: Found) -> None:
        """Replace or add a question's row, and write the file."""
        self.rows[number : number + 1] = [row]
        kept = {"setting": self.setting, "wrappers": self.wrappers, "rows": self.rows}
        self.path.write_text(json.dumps(kept), encoding="utf-8")


def report(rows: Sequence[Found]) -> Iterator[str]:
    """Yield a table: mean with its interval, median, 90th percentile, and the paired difference from the default."""
    draws = Bootstrap(len(rows))
    yield f"{len(rows)} questions\n"
    yield f"| setting | KL (95 %) | median | 90th percentile | minus {DEFAULT} (95 %) | nearer |\n{'|---' * 6}|"
    for name in (name for name in rows[0] if all(name in row for row in rows)):
        own, default = ([row[key] for row in rows] for key in (name, DEFAULT))
        of, less = draws.interval(mean, own), draws.interval(difference, own, default)
        assert of is not None
        assert less is not None
        tenths = statistics.quantiles(own, n=10, method="inclusive")
        nearer = sum(a < b for a, b in zip(own, default, strict=True))
        yield (
            f"| {name} | {of.value:.3f} ({of.low:.3f} to {of.high:.3f}) | {statistics.median(own):.3f} | {tenths[-1]:.3f} | "
            f"{less.value:+.3f} ({less.low:+.3f} to {less.high:+.3f}) | {nearer} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with musique_dev.json")
    parser.add_argument("--wrappers", action="append", default=[], metavar="FILE", help="of wrappers.py (repeatable)")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--questions", type=int, default=15)
    parser.add_argument("--cut", type=int, metavar="TOKENS", help="take only the first tokens of each passage")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="each question's KL, JSON; what it has of these settings and wrappers is not measured again",
    )
    arguments = parser.parse_args()
    files = [Path(file) for file in arguments.wrappers]
    digests = {file.stem: hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest() for file in files}
    setting = {name: getattr(arguments, name) for name in ("model", "dtype", "cut")}
    try:
        kept = Figures.of(arguments.out, setting | {"correction": CORRECTION}, digests)
    except ValueError as error:
        parser.error(str(error))
    engine = Engine.load(EngineConfig(model=arguments.model, dtype=arguments.dtype, kv_dtype=arguments.dtype))
    samples = musique(arguments.data, 4)[1::2][: arguments.questions]
    if arguments.cut is not None:
        samples = [shortened(engine, sample, arguments.cut) for sample in samples]
    wrappers = {file.stem: Wrappers.load(file) for file in files}
    for number, row in enumerate(measure(engine, samples, wrappers, [*kept.rows])):
        kept.put(number, row)
        print(f"  {number + 1}/{len(samples)}", file=sys.stderr, flush=True)
    print("\n".join(report(kept.rows[: len(samples)])))


if __name__ == "__main__":
    main()
