"""A CUDA device without a GPU, for tests: tensors that say cuda:0 and hold CPU memory.

It refuses what a GPU refuses (mixed devices, host pointers in kernels), counts synchronisations and pageable copies,
records and replays CUDA graphs, and checks the order of accesses over streams and events. Works with a CPU build of
torch. Begin with `installed`.
"""

from fake_gpu.device import FakeGpu
from fake_gpu.install import installed
from fake_gpu.kernels import compute_with_torch, watch_launches
from fake_gpu.tensors import DeviceTensor, PinnedTensor

__all__ = ["DeviceTensor", "FakeGpu", "PinnedTensor", "compute_with_torch", "installed", "watch_launches"]
