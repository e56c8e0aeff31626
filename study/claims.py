"""How well the check of claims (docs/gate.md) tells changed figures and names: the figures of study/claims.md.

    python study/claims.py answers --model MODEL --answers FILE.jsonl [--set SET --data FOLDER --questions N]
    python study/claims.py report FILE.jsonl ...

`answers` asks the questions of a set in full and blended, and appends to FILE, which it can continue. `report` looks up
the claims of these answers as they are, and with one digit, date or letter of a name changed, and writes
study/results/claims.json and the tables of study/claims.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from sets import filler, musique, needles, office, spellable_samples

from cacheblend_cli import Engine
from cacheblend_cli.evaluation.samples import Sample

SETS = {
    "handbook": lambda data: spellable_samples(),
    "office": lambda data: office(1) + office(1, seed=1),
    "needles": lambda data: needles(filler(data), 4),
    "musique": lambda data: musique(data, 4),
}
MODES = {"full": {"mode": "full"}, "blended": {"mode": "blend", "ratio": 0.15}}
SYSTEM = {
    "office": "Answer from the documents in two or three sentences. Give the numbers, names and times that matter.",
    "musique": "Answer from the documents in two or three sentences. Give the names and dates that matter.",
}


def ask(arguments: argparse.Namespace) -> None:
    """Append the answers that the file lacks."""
    path: Path = arguments.answers
    known = {(r["set"], r["number"]) for r in read([path])} if path.exists() else set()
    samples = SETS[arguments.set](arguments.data)[: arguments.questions]
    system = {"system": SYSTEM[arguments.set]} if arguments.set in SYSTEM else {}
    load = partial(Engine.load, arguments.model, max_tokens=96, threads=arguments.threads, **system)
    with load() as engine, path.open("a", encoding="utf-8") as out:
        for number, sample in enumerate(samples):
            if (arguments.set, number) not in known:
                for record in answered(engine, sample):
                    own = {"model": Path(arguments.model).name, "set": arguments.set, "number": number}
                    out.write(json.dumps(own | record) + "\n")
                out.flush()


def answered(engine: Engine, sample: Sample) -> Iterator[dict[str, Any]]:
    texts = [context.text for context in sample.contexts]
    engine.ask(sample.question, documents=texts, max_tokens=1)  # stores the KV
    for mode, settings in MODES.items():
        answer = engine.ask(sample.question, documents=texts, **settings)
        yield {"mode": mode, "question": sample.question, "passages": texts, "answer": answer.text}


def read(paths: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    asking = commands.add_parser("answers")
    asking.add_argument("--model", required=True)
    asking.add_argument("--answers", type=Path, required=True)
    asking.add_argument("--set", choices=SETS, default="office")
    asking.add_argument("--data", type=Path, help="folder with musique_dev.json")
    asking.add_argument("--questions", type=int)
    asking.add_argument("--threads", type=int, default=2)
    asking.set_defaults(run=ask)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
