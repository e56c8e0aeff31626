"""Models and stores of `peers.py`: checkpoints in float32 and bfloat16, GGUF files of the same weights, and chunks of a
document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from machine import write_checkpoint

from cacheblend_cli.cli.main import VARIABLES

QUESTION = "Which team was billed?"
CHUNKS, CHUNK_TOKENS, ANSWER_TOKENS = 8, 256, 100
CLI = [sys.executable, "-c", "from cacheblend_cli.cli.main import main; main()"]
PRECISIONS = {
    "float32": ("float32", "auto"),
    "bfloat16": ("bfloat16", "auto"),
    "int8 weights": ("bfloat16", "int8"),
}
QUANTS = ("F16", "BF16", "Q8_0", "Q4_0")


def precisions() -> list[str]:
    """Return those of PRECISIONS that this CPU has products for: without AVX-512 oneDNN has none in bfloat16, and
    without VNNI no exact ones of int8."""
    import torch
    from cacheblend_kernels.torch_attention import onednn_multiplies

    lacking = {"int8 weights"} if not torch.cpu._is_vnni_supported() else set()
    return [n for n, (dtype, _) in PRECISIONS.items() if onednn_multiplies(getattr(torch, dtype)) and n not in lacking]


def environment(python: str) -> dict[str, str]:
    """Return the environment of a measured program: without threads and spinning that somebody has set, nor, of another
    Python, our path."""
    unset = ("OMP_NUM_THREADS", "PYTHONPATH" if python != sys.executable else "", *VARIABLES)
    return {k: v for k, v in os.environ.items() if k not in unset} | {"HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Models:
    """Paths of the models and the prompt's ids, and the commands over them."""

    folder: Path

    @property
    def ids(self) -> Path:
        return self.folder / "ids.json"

    def checkpoint(self, dtype: str) -> Path:
        return self.folder / dtype

    def gguf(self, kind: str) -> Path:
        return self.folder / f"{kind}.gguf"

    def machine(self, precision: str) -> list[str]:
        dtype, weights = PRECISIONS[precision]
        store = self.folder / f"store {precision}"
        model = ["--model", str(self.checkpoint(dtype)), "--store", str(store), "--dtype", dtype]
        return [*model, "--weight-dtype", weights]

    def chunks(self, precision: str) -> str:
        """Ids of the prompt's chunks, with commas."""
        return (self.folder / f"chunks {precision}").read_text()

    def ask(self, precision: str) -> list[str]:
        asked = [
            "ask",
            QUESTION,
            "--chunks",
            self.chunks(precision),
            "--local",
            "--json",
            "--ids",
            "--temperature",
            "0",
        ]
        return [
            "env",
            "CACHEBLEND_SPECULATE=off",  # random weights repeat themselves
            "CACHEBLEND_STOP_REPETITION=false",
            "CACHEBLEND_SPECULATE=off",  # random weights repeat themselves
            *CLI,
            *asked,
            "--max-tokens",
            str(ANSWER_TOKENS),
            *self.machine(precision),
        ]


def prepare(models: Models, config: Path) -> None:
    """Write missing models in a process of their own, so that no measured process inherits its peak memory."""
    models.folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, __file__, str(models.folder), str(config)], check=True)


def write_models(models: Models, config: Path) -> None:
    import gguf
    import torch
    from safetensors.torch import load_file, save_file

    if not (models.checkpoint("float32") / "model.safetensors").exists():
        write_checkpoint(models.checkpoint("float32"), config)
    plain, half = models.checkpoint("float32"), models.checkpoint("bfloat16")
    weights = load_file(plain / "model.safetensors")
    settings = json.loads((plain / "config.json").read_text())
    if not (half / "model.safetensors").exists():
        half.mkdir(exist_ok=True)
        for file in plain.glob("*.json"):
            (half / file.name).write_bytes(file.read_bytes())
        (half / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}))
        save_file({n: w.to(torch.bfloat16) for n, w in weights.items()}, half / "model.safetensors", {"format": "pt"})
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, settings["num_hidden_layers"])
    for kind in QUANTS:
        if models.gguf(kind).exists():
            continue
        writer = gguf.GGUFWriter(models.gguf(kind), "qwen2")
        writer.add_block_count(settings["num_hidden_layers"])
        writer.add_context_length(settings["max_position_embeddings"])
        writer.add_embedding_length(settings["hidden_size"])
        writer.add_feed_forward_length(settings["intermediate_size"])
        writer.add_head_count(settings["num_attention_heads"])
        writer.add_head_count_kv(settings["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
        writer.add_rope_freq_base(settings["rope_theta"])
        writer.add_vocab_size(settings["vocab_size"])
        writer.add_tokenizer_model("no_vocab")
        for name, weight in weights.items():
            used = gguf.GGMLQuantizationType[kind] if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
            own = names.get_name(name, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(own, gguf.quantize(weight.numpy(), used), raw_dtype=used)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def precompute(models: Models, precision: str) -> None:
    """Store the documents, and write the ids of the first chunks."""
    noted = models.folder / f"chunks {precision}"
    if noted.exists():
        return
    document = models.folder / "billing.txt"
    document.write_text(" ".join(f"In week {i} team {i % 7} billed client {i % 13}." for i in range(CHUNKS * 100)))
    command = [*CLI, "precompute", str(document), "--chunk-tokens", str(CHUNK_TOKENS), "--context", "sink", "--json"]
    output = subprocess.run([*command, *models.machine(precision)], check=True, capture_output=True, text=True)
    chunks = [json.loads(line) for line in output.stdout.splitlines()]
    assert len(chunks) >= CHUNKS
    noted.write_text(",".join(chunk["id"] for chunk in chunks[:CHUNKS]))


if __name__ == "__main__":
    write_models(Models(Path(sys.argv[1])), Path(sys.argv[2]))
