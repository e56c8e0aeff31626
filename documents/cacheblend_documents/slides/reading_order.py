"""Reading order of boxes on a slide: rows from top to bottom, columns from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Box = tuple[int, int, int, int]
"""Left, top, width, height."""

_OVERLAP = 0.15  # share at each end of a box that may lie beside another one
_DEEPEST = 8  # nested splits


def reading_order(boxes: Sequence[Box]) -> list[int]:
    """Return the indices of the boxes in reading order.

    The boxes are split at the gaps between them, into rows or columns, then each part again. If both are possible, the
    given order decides: the split with more neighbours in the same part. Boxes without a gap keep the given order.
    """
    return _order(list(range(len(boxes))), boxes, 0)


def _order(indices: list[int], boxes: Sequence[Box], depth: int) -> list[int]:
    if len(indices) < 2 or depth == _DEEPEST:
        return indices
    rows, columns = _split(indices, boxes, 1), _split(indices, boxes, 0)
    parts = max(rows, columns, key=lambda found: (len(found) > 1, _num_neighbours(indices, found)))
    return indices if len(parts) < 2 else [i for part in parts for i in _order(part, boxes, depth + 1)]


def _split(indices: list[int], boxes: Sequence[Box], axis: int) -> list[list[int]]:
    """Return the parts between gaps, in order. axis: 0 for columns, 1 for rows."""
    parts, end = list[list[int]](), float("-inf")
    for index in sorted(indices, key=lambda i: boxes[i][axis] + _OVERLAP * boxes[i][axis + 2]):
        start, size = boxes[index][axis], boxes[index][axis + 2]
        if start + _OVERLAP * size >= end:
            parts.append([])
        parts[-1].append(index)
        end = max(end, start + (1 - _OVERLAP) * size)
    return [sorted(part) for part in parts]


def _num_neighbours(indices: list[int], parts: list[list[int]]) -> int:
    """Return the number of pairs next to each other in the given order and in the same part."""
    part_of = {index: n for n, part in enumerate(parts) for index in part}
    return sum(part_of[a] == part_of[b] for a, b in pairwise(indices))
