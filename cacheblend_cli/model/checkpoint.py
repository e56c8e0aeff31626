"""Choice of the source of weights for a model directory: safetensors files, quantised or not, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from cacheblend_cli.model.families.quantisation import quantisation_of
from cacheblend_cli.model.model_files import checkpoint_files, is_converted
from cacheblend_cli.model.spec import ExpertsSpec
from cacheblend_cli.model.tensor_source import SafetensorsFiles, TensorSource


def tensor_source(model_dir: Path, experts: ExpertsSpec | None = None) -> TensorSource:
    """Return the source for a model directory: safetensors files, quantised or not, or a GGUF file. experts: the
    model's, which may be in one tensor. Raises as `checkpoint_files`."""
    if is_converted(model_dir):
        from cacheblend_cli.model.gguf_files.tensors import GGUFTensors

        return GGUFTensors(model_dir)
    files = SafetensorsFiles(checkpoint_files(model_dir))
    quantisation = quantisation_of(model_dir)
    if quantisation is None and experts is None:
        return files
    if quantisation is None or quantisation.method == "mxfp4":
        from cacheblend_cli.model.split_experts import SplitExperts

        return SplitExperts(files, stacked=experts is not None and experts.beside)
    from cacheblend_cli.model.quantised import DequantisedTensors

    return DequantisedTensors(files, quantisation)
