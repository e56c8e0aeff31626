"""Write weights as quantised and read back by the library that defines the formats:
tests/model/quantised_samples.safetensors.

    pip install compressed-tensors accelerate
    python tools/quantised_samples.py

Each sample has a layer's tensors as the library stores them under `NAME/layer.`, and as it reads them back under
`NAME/read`. The file's metadata has each sample's quantization_config.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from torch import Tensor

OUT = Path(__file__).resolve().parent.parent / "tests" / "model" / "quantised_samples.safetensors"
ROWS, COLUMNS = 40, 64
Sample = tuple[dict[str, Tensor], Tensor, dict[str, Any]]


def compressed(form: str, **weights: Any) -> Sample:
    args = QuantizationArgs(**weights)
    weight = torch.randn(ROWS, COLUMNS) * 0.1 + 0.02
    scale, zero_point = calculate_qparams(*_extremes(weight, args), args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(form)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    stored = compressor.compress(state, scheme)
    read = compressor.decompress(dict(stored), scheme)["weight"]
    group = {"weights": json.loads(args.model_dump_json()), "targets": ["Linear"]}
    return stored, read, {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def _extremes(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    if args.strategy == "tensor":
        return weight.amin().reshape(1), weight.amax().reshape(1)
    if args.strategy == "block":
        rows, columns = args.block_structure
        tiles = torch.nn.functional.pad(weight, (0, -COLUMNS % columns, 0, -ROWS % rows))
        tiles = tiles.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2).flatten(2)
    else:
        tiles = weight.unflatten(1, (-1, args.group_size or COLUMNS))
    return tiles.amin(-1), tiles.amax(-1)


def main() -> None:
    torch.manual_seed(0)
    made = {
        "fp8 tensor": compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        "fp8 blocks": compressed(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 24]
        ),
        "int8 channels": compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        "int8 asymmetric": compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
        "packed 4 bits": compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16),
        "packed 4 bits asymmetric": compressed(
            "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False
        ),
        "packed 8 bits": compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
    }
    tensors, configs = dict[str, Tensor](), {}
    for name, (parts, read, config) in made.items():
        tensors |= {f"{name}/layer.{part}": tensor.detach().contiguous().clone() for part, tensor in parts.items()}
        tensors[f"{name}/read"] = read.detach().float().contiguous()
        configs[name] = json.dumps(config)
    save_file(tensors, OUT, metadata=configs)


if __name__ == "__main__":
    main()
