"""Parse pages without trusting them: any inconsistency raises a ValueError with the reason."""

from __future__ import annotations

import itertools
import struct
from bisect import bisect_right
from typing import NamedTuple

HEADER = 16  # bytes in a page before the node pointers
NO_PAGE = (1 << 64) - 1
MAX_DEPTH = 32
PAGE_SIZES = (4096, 8192, 16384, 32768, 65536)
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_BIG, SUBTREE = 1, 2  # node flags
_INTEGER_KEYS = 8  # flags of the free list
_NODE = struct.Struct("<HHHH")
_PAGE = struct.Struct("<QHHHH")
_TREE = struct.Struct("<IHHQQQQQ")
_NUMBER = struct.Struct("<Q")
_unpack_node = _NODE.unpack_from


class Tree(NamedTuple):
    """One B+tree: an MDB_db record."""

    root: int
    depth: int
    entries: int
    flags: int
    num_pages: int


class Meta(NamedTuple):
    """A meta page: the state after one commit."""

    txnid: int
    next_pgno: int  # number of pages in the file, including free pages
    page_size: int
    free: Tree
    main: Tree


class Node(NamedTuple):
    """Place of a value: inline bytes, or the first overflow page of a big value."""

    key: bytes
    size: int
    inline: bytes
    pgno: int
    flags: int

    @property
    def big(self) -> bool:
        return self.flags == _BIG


class Bounds(NamedTuple):
    """Range of keys that a page may hold: low <= key < high (None = no end)."""

    low: bytes = b""
    high: bytes | None = None


class Branch(NamedTuple):
    keys: list[bytes]
    children: list[int]

    def at(self, key: bytes) -> int:
        """Return the index of the child that holds the key."""
        return max(0, bisect_right(self.keys, key) - 1)

    def bounds(self, at: int, outer: Bounds) -> Bounds:
        """Return the keys that the child at `at` may hold if this page may hold `outer`."""
        high = self.keys[at + 1] if at + 1 < len(self.keys) else outer.high
        return Bounds(self.keys[at] if at else outer.low, high)


class Leaf(NamedTuple):
    """A checked page of records. Nodes are created on demand, because few of them are needed."""

    keys: list[bytes]
    pointers: tuple[int, ...]
    data: bytes

    def node(self, at: int) -> Node:
        low, high, flags, key_size = _NODE.unpack_from(self.data, self.pointers[at])
        body, size = self.pointers[at] + _NODE.size + key_size, low | high << 16
        if flags == _BIG:
            return Node(self.keys[at], size, b"", _NUMBER.unpack_from(self.data, body)[0], flags)
        return Node(self.keys[at], size, self.data[body : body + size], 0, flags)


def parse_meta(page: bytes) -> Meta | None:
    """Return the fields of a meta page, None if it is not from an LMDB 0.9 file."""
    if len(page) < HEADER + 136:
        return None
    _, _, flags, _, _ = _PAGE.unpack_from(page)
    magic, version, _, _ = struct.unpack_from("<IIQQ", page, HEADER)
    if magic != _MAGIC or version != _VERSION or not flags & _META:
        return None
    page_size, free_flags = struct.unpack_from("<IH", page, HEADER + 24)  # the first word of `free` is the page size
    last, txnid = struct.unpack_from("<QQ", page, HEADER + 24 + 96)
    free, main = _tree(page, HEADER + 24), _tree(page, HEADER + 72)
    if page_size not in PAGE_SIZES or free_flags != _INTEGER_KEYS or main.flags != 0:
        return None
    return Meta(txnid, last + 1, page_size, free, main)


def parse_tree(node: Node) -> Tree:
    """Return the tree of a named database."""
    if node.flags != SUBTREE or node.size != _TREE.size:
        raise ValueError("it is not the record of a database")
    tree = _tree(node.inline, 0)
    if tree.flags != 0 or tree.depth > MAX_DEPTH or (tree.root == NO_PAGE) != (tree.entries == 0):
        raise ValueError("the record of a database is damaged")
    return tree


def parse_page(data: bytes, pgno: int, num_pages: int, *, integer_keys: bool) -> Branch | Leaf:
    """Parse a page of a tree. num_pages: pages in the file. integer_keys: the page belongs to the free list; its keys
    are little-endian integers."""
    number, _, flags, lower, upper = _PAGE.unpack_from(data)
    size, count, is_branch = len(data), (lower - HEADER) >> 1, flags == _BRANCH
    if number != pgno or flags not in (_BRANCH, _LEAF) or lower & 1 or not HEADER < lower <= upper <= size:
        raise ValueError("its header is damaged")
    if is_branch and count < 2 and not integer_keys:
        raise ValueError("it is a branch with one child")
    pointers = struct.unpack_from(f"<{count}H", data, HEADER)
    if min(pointers) < upper or max(pointers) + _NODE.size > size:
        raise ValueError("a node lies outside of it")
    ends, keys, named_pages = list[int](), list[bytes](), list[int]()
    for at in pointers:
        low, high, node_flags, key_size = _unpack_node(data, at)
        start = at + 8
        end = body = start + key_size
        if is_branch:
            named_pages.append(low | high << 16 | node_flags << 32)
        else:
            if node_flags == _BIG:
                end += 8
                named_pages += _NUMBER.unpack_from(data, body)
            else:
                end += low | high << 16
            if end > size or not 1 <= key_size <= 511 or node_flags > SUBTREE:
                raise ValueError("a node of it is damaged")
        keys.append(data[start:body])
        ends.append(end + (end & 1))
    if named_pages and not 2 <= min(named_pages) <= max(named_pages) < num_pages:
        raise ValueError("a node names a missing page")
    if [*sorted(pointers), size] != [upper, *sorted(ends)]:
        raise ValueError("its nodes overlap or leave a gap")  # LMDB relies on contiguous nodes when it moves them
    named = keys[1:] if is_branch else keys
    order = [key[::-1] for key in named] if integer_keys else named
    if order != sorted(set(order)):
        raise ValueError("its keys are out of order")
    return Branch([b"", *named], named_pages) if is_branch else Leaf(keys, pointers, data)


def check_big(header: bytes, node: Node, page_size: int, num_pages: int) -> None:
    """Check the header of the first overflow page of a big value. LMDB frees as many pages as the header says."""
    if header[:8] + bytes(2) + header[10:] != big_header(node, page_size, num_pages):
        raise ValueError("it does not begin the expected value")


def big_header(node: Node, page_size: int, num_pages: int) -> bytes | None:
    """Return the header that `check_big` takes, but for its padding; None if there is none."""
    pages = (HEADER - 1 + node.size) // page_size + 1
    if not node.big or not 2 <= node.pgno <= num_pages - pages:
        return None
    return _PAGE.pack(node.pgno, 0, _OVERFLOW, pages & 0xFFFF, pages >> 16)


def parse_free(key: bytes, value: memoryview, num_pages: int) -> tuple[int, ...]:
    """Return the page numbers of a record of the free list, in descending order."""
    count = int.from_bytes(value[:8], "little")
    if len(key) == 8 and 8 * (count + 1) <= len(value):
        pages: tuple[int, ...] = struct.unpack_from(f"<{count}Q", value, 8)
        ordered = all(a > b for a, b in itertools.pairwise(pages))
        if not pages or (ordered and pages[-1] >= 2 and pages[0] < num_pages):
            return pages
    raise ValueError("a record of the free list is damaged")


def _tree(data: bytes, at: int) -> Tree:
    _, flags, depth, branches, leaves, overflow, entries, root = _TREE.unpack_from(data, at)
    return Tree(root, depth, entries, flags, branches + leaves + overflow)
