"""Train the bundled demo model: `python -m tools.train_demo_model OUT --minutes 30`. Seeded; CPU.

Tokenizer, checkpoint and loss log go to OUT in HF format; `python -m tools.make_handbook` writes the corpus.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model import world
from tools.demo_model.muon import Muon
from tools.demo_model.network import Network, Shape
from tools.demo_model.samples import SPECIALS, SUFFIX, SampleMaker

TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
VOCAB, LENGTH, BATCH = 1200, 448, 16
MUON_LR, ADAMW_LR = 0.0045, 0.0015


def train_tokenizer(seed: int) -> Tokenizer:
    """Train a byte-level BPE on pages and questions; the held-out names are not in its text."""
    rng = random.Random(seed)
    texts = []
    for _ in range(3000):
        person = world.make_person(rng, set(), "train" if rng.random() < 0.3 else "known")
        page = world.make_page(rng, person, 3)
        texts.append("".join(page.chunk_texts()))
        for fact in page.facts:
            question, answer, _ = world.ask(rng, person, fact)
            texts.append(SUFFIX.format(question=question).replace("<|end|>", "").replace("<|assistant|>", "") + answer)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def export(network: Network, tokenizer: Tokenizer, out: Path) -> None:
    """Write the checkpoint in HF format, bf16."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    end, bos = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<s>")
    weights = {n: t.to(torch.bfloat16).contiguous() for n, t in network.checkpoint().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    eos = [end, tokenizer.token_to_id("</s>")]
    files = {
        "config.json": network.config(end, bos, 2048),
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|end|>", "chat_template": TEMPLATE,
            "model_max_length": 2048, "clean_up_tokenization_spaces": False,
        },
    }  # fmt: skip
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def train(out: Path, minutes: float, seed: int, resume: Path | None) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(2)
    tokenizer = train_tokenizer(seed) if resume is None else Tokenizer.from_file(str(resume / "tokenizer.json"))
    maker = SampleMaker(tokenizer, LENGTH, seed + 1 + 1000 * (resume is not None))
    network = Network(Shape(tokenizer.get_vocab_size()))
    if resume is not None:  # the exported weights; the probe is learned anew
        network.restore(load_file(resume / "model.safetensors"))
    print("parameters", sum(p.numel() for p in network.parameters()), flush=True)
    matrices = [p for n, p in network.named_parameters() if p.dim() == 2 and "layers" in n]
    rest = [p for n, p in network.named_parameters() if not (p.dim() == 2 and "layers" in n)]
    muon, adamw = Muon(matrices, lr=MUON_LR), torch.optim.AdamW(rest, lr=ADAMW_LR, weight_decay=0.0)
    start, step, tokens, log = time.time(), 0, 0, (out / "train_log.jsonl")
    out.mkdir(parents=True, exist_ok=True)
    while (share := (time.time() - start) / (60 * minutes)) < 1:
        short = resume is None and share < 0.12  # first few people, then the size of a real prompt
        batch = maker.batch(BATCH, (2, 4) if short else (2, 6), (2, 3) if short else (2, 4))
        factor = min(1.0, step / 50) * min(1.0, max(0.02, (1 - share) / (0.4 if resume is None else 1.0)))
        muon.lr, adamw.param_groups[0]["lr"] = MUON_LR * factor, ADAMW_LR * factor
        lm, probe, look = network.losses(batch)
        (lm + 0.5 * probe + 0.5 * look).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        muon.step()
        adamw.step()
        adamw.zero_grad()
        step, tokens = step + 1, tokens + int((batch.block >= 0).sum())
        if step % 50 == 0:
            row = {
                "step": step,
                "minutes": round((time.time() - start) / 60, 2),
                "tokens": tokens,
                "lm": round(lm.item(), 4),
                "probe": round(probe.item(), 4),
                "look": round(look.item(), 4),
            }
            print(json.dumps(row), flush=True)
            with log.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
        if step % 500 == 0:
            export(network, tokenizer, out)
    export(network, tokenizer, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--resume", type=Path, help="continue from the checkpoint in this directory")
    arguments = parser.parse_args()
    train(arguments.out, arguments.minutes, arguments.seed, arguments.resume)
