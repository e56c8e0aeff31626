"""Decode steps: eager, or as a replayed CUDA graph.

A runner takes tokens and returns logits on the device: the host only queues work. The graph runner uses static buffers;
positions and lengths advance on the device, so a replay needs nothing from the host. `begin` uploads what changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from cacheblend_kernels import AttentionMetadata
from torch import Tensor

from cacheblend_cli.errors import DeviceError
from cacheblend_cli.kv.forward import Steps, forward
from cacheblend_cli.kv.pool import KVPool, PagedSequence, upload
from cacheblend_cli.kv.rows import LEAST_KV_BUCKET, Rows, bucket, filled, next_rows
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.linear import STEADY_ROWS
from cacheblend_cli.model.rope import rows_of_tables

if TYPE_CHECKING:
    from cacheblend_cli.kv.layer_graphs import LayerGraphs

CAPTURABLE = ("triton", "xformers")  # the torch backend's attention reads lengths on the host

CaptureGraph = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes a function over static tensors, and returns one that repeats it."""


class EagerRunner:
    """Launches every kernel from Python. steps: of its passes, None for the default.

    With a pool, batches are padded to a multiple of STEADY_ROWS rows where torch multiplies, so that an answer does not
    depend on its batch. The pool must outlive the runner, which keeps SPARE slots of it for padding."""

    SPARE = STEADY_ROWS - 1

    def __init__(self, decoder: Decoder, pool: KVPool | None = None) -> None:
        self._decoder = decoder
        self._spare = None if pool is None else pool.allocator.allocate(pool.blocks_for(self.SPARE))[0]
        self.steps: Steps | None = None
        self._sequences: list[PagedSequence] = []
        self._kv_lens: list[int] = []

    def begin(self, sequences: Sequence[PagedSequence], kv_lens: Sequence[int], headroom: int) -> None:
        """Set the batch, once or before each token: sequences with kv_lens tokens, which grow by up to `headroom`.
        Raises DeviceError if the pool is too small."""
        self._sequences, self._kv_lens = list(sequences), list(kv_lens)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Compute tokens, [num_seqs] int64 on the device. Returns logits, fp32 [num_seqs, vocab_size], valid until the
        next step."""
        rows, count = next_rows(self._decoder, self._sequences, self._kv_lens), len(tokens)
        self._kv_lens = [n + 1 for n in self._kv_lens]
        missing = -count % self._decoder.steady_rows
        if missing and self._spare is not None:
            tokens = torch.cat((tokens, tokens.new_zeros(missing)))
            rows = filled(self._decoder, rows, missing, self._spare)
        return forward(self._decoder, rows, tokens, self.steps)[:count]


class GraphRunner:
    """Keeps a graph for each bucket of batch size and context length, captured on first use. The pool must outlive the
    runner and hold one block more than the sequences, for padding and for runs before a capture. least_rows: of the
    graphs of more than one row."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, capture: CaptureGraph | None = None, least_rows: int = 1
    ) -> None:
        self._decoder, self._pool, self._least_rows = decoder, pool, least_rows
        self._capture = capture or cuda_capture
        self._graphs: dict[tuple[int, int], DecodeGraph] = {}
        self.spare = pool.allocator.allocate(1)[0]
        self.layer_graphs: LayerGraphs | None = None  # of prefills over the pool
        self._current: DecodeGraph | None = None
        self._num_seqs = 0

    @torch.inference_mode()
    def begin(self, sequences: Sequence[PagedSequence], kv_lens: Sequence[int], headroom: int) -> None:
        for sequence, kv_len in zip(sequences, kv_lens, strict=True):
            sequence.ensure(kv_len + headroom)
            sequence.make_writable(kv_len, kv_len + headroom)
        graph = self.graph(len(sequences), max(kv_lens) + headroom)
        graph.fill([s.blocks for s in sequences], kv_lens)
        self._current, self._num_seqs = graph, len(sequences)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        assert self._current is not None, "begin comes first"
        self._current.tokens[: self._num_seqs].copy_(tokens)
        self._current.replay()
        return self._current.logits[: self._num_seqs]

    @torch.inference_mode()
    def graph(self, num_seqs: int, kv_len: int) -> DecodeGraph:
        """Return the bucket's graph, captured now on first use. Raises DeviceError if out of memory."""
        least = 1 if num_seqs == 1 else bucket(self._least_rows, 1)
        key = (bucket(num_seqs, least), bucket(kv_len, LEAST_KV_BUCKET))
        if key not in self._graphs:
            try:
                self._graphs[key] = DecodeGraph(self._decoder, self._pool, self.spare, *key, self._capture)
            except torch.OutOfMemoryError as error:
                raise DeviceError(
                    f"{self._decoder.device} has no memory left for a decode graph of {key[0]} rows and {key[1]} positions",
                    "use --eager, or lower --gpu-memory-utilization, which leaves more room beside the pool",
                ) from error
        return self._graphs[key]


DecodeRunner = EagerRunner | GraphRunner


class DecodeGraph:
    """One captured step over static tensors of num_seqs rows. `replay()` computes logits from tokens, and advances by
    one token.

    tokens, positions: [num_seqs] int64; kv_lens: [num_seqs] int32, always positions + 1; live: [num_seqs] int32, 1 for
    a sequence and 0 for padding, which stays at position 0 of the spare block; block_table:
    [num_seqs, max_blocks] int32; logits: fp32 [num_seqs, vocab_size].
    """

    def __init__(
        self, decoder: Decoder, pool: KVPool, spare: int, num_seqs: int, max_kv_len: int, capture: CaptureGraph
    ) -> None:
        self._decoder, self._pool, self._spare, self._max_kv_len = decoder, pool, spare, max_kv_len
        self._tables = decoder.rope.tables(max_kv_len)  # held: the graph reads these very tensors
        device, max_blocks = decoder.device, pool.blocks_for(max_kv_len)
        self.tokens = torch.zeros(num_seqs, dtype=torch.int64, device=device)
        self._positions = torch.zeros(num_seqs, dtype=torch.int64, device=device)
        self._kv_lens = torch.ones(num_seqs, dtype=torch.int32, device=device)
        self._live = torch.zeros(num_seqs, dtype=torch.int32, device=device)
        self._cu_rows = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
        self._block_table = torch.full((num_seqs, max_blocks), spare, dtype=torch.int32, device=device)
        self.logits = torch.zeros(num_seqs, decoder.spec.vocab_size, dtype=torch.float32, device=device)
        self._host_blocks: list[list[int]] = []  # what the block table holds
        self._host_lens: list[int] = []  # what the positions hold
        self._replay = capture(self._run)

    def replay(self) -> None:
        self._replay()
        self._host_lens = [n + 1 for n in self._host_lens]

    def fill(self, blocks: Sequence[Sequence[int]], kv_lens: Sequence[int]) -> None:
        """Set the batch: sequences with these blocks and kv_lens tokens. The next step is at position kv_len of each.
        Uploads only changes."""
        held, device = [list(own) for own in blocks], self.tokens.device
        if self._host_blocks != held:
            table = torch.full(self._block_table.shape, self._spare, dtype=torch.int32)
            for i, own in enumerate(held):
                count = min(len(own), table.shape[1])
                table[i, :count] = torch.tensor(own[:count], dtype=torch.int32)
            self._block_table.copy_(upload(table, device, torch.int32))
            self._host_blocks = held
        if self._host_lens != list(kv_lens):
            idle = [0] * (len(self.tokens) - len(kv_lens))
            positions = upload([*kv_lens, *idle], device)
            self._positions.copy_(positions)
            self._kv_lens.copy_(positions + 1)
            self._live.copy_(upload([*(1 for _ in kv_lens), *idle], device, torch.int32))
            self._host_lens = list(kv_lens)

    def _run(self) -> None:
        positions, size = self._positions, self._pool.block_size
        block = self._block_table.gather(1, (positions // size)[:, None])[:, 0].long()
        attention = AttentionMetadata(
            positions, self._cu_rows, self._block_table, self._kv_lens, max_kv_len=self._max_kv_len
        )
        rows = Rows(
            pool=self._pool,
            positions=positions,
            slots=block * size + positions % size,
            rotations=rows_of_tables(self._tables, positions),
            attention=attention,
            decode=True,
        )
        self.logits.copy_(forward(self._decoder, rows, self.tokens))
        positions.add_(self._live)
        self._kv_lens.add_(self._live)


def make_runner(decoder: Decoder, pool: KVPool, eager: bool = False, least_rows: int = 1) -> DecodeRunner:
    """Return a graph runner on a GPU whose backend can be captured; an eager one if `eager`, if RoPE changes with the
    length, and with experts, transformers' layers or tensor parallelism. With a graph runner, the pool gets graphs of
    prefills too, unless layers differ or need more than hidden states. least_rows: see `GraphRunner`."""
    spec = decoder.spec
    capturable = decoder.device.type == "cuda" and decoder.kernels.name in CAPTURABLE
    alike = decoder.rope.switches_at is None and spec.experts is None and not spec.generic  # every step
    alike = alike and decoder.part.is_whole  # an exchange between ranks is not captured
    if eager or not (capturable and alike):
        return EagerRunner(decoder)
    runner = GraphRunner(decoder, pool, least_rows=least_rows)
    if spec.latent is None and spec.streams is None and spec.shapes is None and not spec.token_width:
        from cacheblend_cli.kv.layer_graphs import LayerGraphs

        pool.layer_graphs = runner.layer_graphs = LayerGraphs(decoder, pool, runner.spare)
    return runner


def cuda_capture(function: Callable[[], None]) -> Callable[[], None]:
    """Run the function twice on a side stream, which compiles and allocates everything, then capture it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        function()
    return graph.replay
