"""LMDB's pages read by hand, every number in them checked before it is believed.

LMDB trusts its own file: a flipped bit in a branch, leaf or meta page can send it out of the map, which ends the
process with a signal. So the pages a look-up will walk are read with `pread` and checked here first; only then is
LMDB asked. Pages of a snapshot do not change while its read transaction is open, so a check holds for as long.

Layout: LMDB 0.9, 64-bit, little-endian (mdb.c: MDB_page, MDB_node, MDB_db, MDB_meta).
"""

from __future__ import annotations

import itertools
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cacheblend_store.errors import StoreCorrupt, StoreIOError

MAGIC, VERSION = 0xBEEFC0DE, 1
HEADER = 16  # bytes of a page before its node pointers
NO_PAGE = (1 << 64) - 1
MAX_DEPTH = 32
PAGE_SIZES = (4096, 8192, 16384, 32768, 65536)
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_BIG, _SUBTREE = 1, 2  # node flags
_INTEGER_KEYS = 8  # the free list's flags
_NODE = struct.Struct("<HHHH")
_PAGE = struct.Struct("<QHHHH")
_TREE = struct.Struct("<IHHQQQQQ")
_NUMBER = struct.Struct("<Q")


class Tree(NamedTuple):
    """One B+tree: an MDB_db record."""

    root: int
    depth: int
    entries: int
    flags: int
    num_pages: int


class Meta(NamedTuple):
    """A meta page. next_pgno: pages in use, the free ones among them."""

    txnid: int
    next_pgno: int
    page_size: int
    free: Tree
    main: Tree


class Node(NamedTuple):
    """Where a value is: inline bytes, or the first of its overflow pages."""

    key: bytes
    size: int
    inline: bytes
    pgno: int
    flags: int


Bounds = tuple[bytes, bytes | None]
"""Keys from (inclusive) and to (exclusive; None: no end) that a page may hold."""
_EVERYTHING: Bounds = (b"", None)


class Branch(NamedTuple):
    keys: list[bytes]
    children: list[int]

    def bounds(self, at: int, outer: Bounds) -> Bounds:
        """What the child at `at` may hold, when this page may hold `outer`."""
        low = self.keys[at] if at else outer[0]
        return low, self.keys[at + 1] if at + 1 < len(self.keys) else outer[1]


class Leaf(NamedTuple):
    keys: list[bytes]
    nodes: list[Node]


_NOWHERE: tuple[Leaf, bytes, bytes | None] = (Leaf([], []), b"", b"")


def parse_meta(page: bytes) -> Meta | None:
    """A meta page's fields, None when it is not one of an LMDB 0.9 file."""
    if len(page) < HEADER + 136:
        return None
    _, _, flags, _, _ = _PAGE.unpack_from(page)
    magic, version, _, _ = struct.unpack_from("<IIQQ", page, HEADER)
    if magic != MAGIC or version != VERSION or not flags & _META:
        return None
    free, (page_size, free_flags) = _tree(page, HEADER + 24), struct.unpack_from("<IH", page, HEADER + 24)
    last, txnid = struct.unpack_from("<QQ", page, HEADER + 24 + 96)
    return Meta(txnid, last + 1, page_size, free._replace(flags=free_flags), _tree(page, HEADER + 72))


class PageReader:
    """Checked look-ups in one snapshot of a data.mdb.

    Every page is read and checked once. Raises StoreCorrupt, naming the page. Not thread-safe: one a transaction.
    """

    def __init__(self, handle: int, meta: Meta, where: str) -> None:
        self._handle, self.meta, self._where = handle, meta, where
        self._pages: dict[int, Branch | Leaf] = {}
        self._trees: dict[bytes, Tree] = {}
        self._found: dict[int, tuple[Leaf, bytes, bytes | None]] = {}
        self._writable: dict[int, Bounds] = {}
        if meta.free.flags != _INTEGER_KEYS or meta.main.flags != 0:
            raise self._bad(0, "its flags are not those of a store")

    def tree(self, name: bytes) -> Tree | None:
        """A named database's tree, None when there is none of that name."""
        if name not in self._trees:
            node = self.get(self.meta.main, name)
            if node is None:
                return None
            if node.flags != _SUBTREE or node.size != _TREE.size:
                raise self._bad(self.meta.main.root, f"the record of database {name!r} is damaged")
            tree = _tree(node.inline, 0)
            if tree.flags != 0 or tree.depth > MAX_DEPTH or (tree.root == NO_PAGE) != (tree.entries == 0):
                raise self._bad(self.meta.main.root, f"the record of database {name!r} is damaged")
            self._trees[name] = tree
        return self._trees[name]

    def get(self, tree: Tree, key: bytes) -> Node | None:
        """Where the key's value is, all pages on the way and the value's extent checked."""
        if tree.root == NO_PAGE:
            return None
        leaf, low, high = self._found.get(tree.root, _NOWHERE)
        if not (low <= key and (high is None or key < high)):
            leaf, (low, high) = self._leaf_of(tree, key)
            self._found[tree.root] = leaf, low, high  # a chunk's blobs follow one another
        at = bisect_right(leaf.keys, key) - 1
        if at < 0 or leaf.keys[at] != key:
            return None
        self.check_extent(leaf.nodes[at])
        return leaf.nodes[at]

    def _leaf_of(self, tree: Tree, key: bytes) -> tuple[Leaf, Bounds]:
        """The leaf that holds the key if the tree does, and what it may hold."""
        pgno, depth, bounds = tree.root, 1, _EVERYTHING
        while isinstance(page := self._page_within(pgno, tree, bounds), Branch):
            at = max(0, bisect_right(page.keys, key) - 1)
            pgno, bounds = page.children[at], page.bounds(at, bounds)
            depth += 1
            if depth > MAX_DEPTH:
                raise self._bad(pgno, "the tree is deeper than any tree")
        if depth != tree.depth:
            raise self._bad(pgno, f"it is at depth {depth} of a tree of depth {tree.depth}")
        return page, bounds

    def nodes(self, tree: Tree, start: bytes = b"") -> Iterator[Node]:
        """All nodes from `start` on, in key order. Extents are not checked: `check_extent` before the value is read."""
        if tree.root == NO_PAGE:
            return
        stack: list[tuple[Branch, int, Bounds]] = []
        pgno, bounds = tree.root, _EVERYTHING
        while True:
            while isinstance(page := self._page_within(pgno, tree, bounds), Branch):
                at = max(0, bisect_right(page.keys, start) - 1) if start else 0
                stack.append((page, at, bounds))
                if len(stack) >= MAX_DEPTH:
                    raise self._bad(pgno, "the tree is deeper than any tree")
                pgno, bounds = page.children[at], page.bounds(at, bounds)
            for node in page.nodes:
                if node.key >= start or tree is self.meta.free:
                    yield node
            start = b""
            while stack and stack[-1][1] + 1 == len(stack[-1][0].children):
                stack.pop()
            if not stack:
                return
            branch, at, outer = stack.pop()
            stack.append((branch, at + 1, outer))
            pgno, bounds = branch.children[at + 1], branch.bounds(at + 1, outer)

    def check_writable(self, tree: Tree, key: bytes) -> None:
        """The path to `key` and, on every level, the neighbours that LMDB merges with or borrows from."""
        if tree.root == NO_PAGE:
            return
        low, high = self._writable.get(tree.root, (b"", b""))
        if low <= key and (high is None or key < high):
            return  # the leaf that was checked last: a chunk's blobs follow one another
        pgno, depth, bounds = tree.root, 1, _EVERYTHING
        while isinstance(page := self._page_within(pgno, tree, bounds), Branch) and depth < MAX_DEPTH:
            at = max(0, bisect_right(page.keys, key) - 1)
            for near in range(max(0, at - 2), min(at + 3, len(page.children))):
                self._page_within(page.children[near], tree, page.bounds(near, bounds))
            pgno, bounds = page.children[at], page.bounds(at, bounds)
            depth += 1
        if depth != tree.depth:
            raise self._bad(pgno, f"it is at depth {depth} of a tree of depth {tree.depth}")
        self._writable[tree.root] = bounds

    def check_age(self) -> None:
        """The meta page is of the commit it says it is of, and not of the one before.

        Every commit frees the pages it replaced, under its own number, so that is the last key of the free list. A meta
        page whose number is damaged can pass for the newest, or let the other pass for it, and a commit would be lost.
        """
        if self.meta.txnid > 2 and self.last_freed() != self.meta.txnid:
            raise self._bad(self.meta.txnid & 1, "it is not of the commit it says it is of")

    def last_freed(self) -> int:
        """The commit that freed pages last, 0 when none has."""
        tree = self.meta.free
        pgno, depth = tree.root, 0
        while pgno != NO_PAGE and depth < MAX_DEPTH:
            page, depth = self.page_at(pgno, tree), depth + 1
            if isinstance(page, Leaf):
                return int.from_bytes(page.keys[-1], "little")
            pgno = page.children[-1]
        return 0

    def check_free_list(self) -> None:
        """Every record of the list of free pages, from which a write takes its pages, is sound."""
        for _ in self.free_pages():
            pass

    def free_pages(self) -> Iterator[tuple[int, ...]]:
        """Page numbers of each record of the list of free pages: in range, in order, and no more than there are."""
        tree, seen = self.meta.free, 0
        for node in self.nodes(tree):
            self.check_extent(node)
            value = self.value(node)
            count = int.from_bytes(value[:8], "little")
            if len(node.key) != 8 or 8 * (count + 1) > len(value):
                raise self._bad(tree.root, "a record of the free list is damaged")
            pages = struct.unpack_from(f"<{count}Q", value, 8)
            ordered = all(a > b for a, b in itertools.pairwise(pages))
            if count and not (ordered and pages[-1] >= 2 and pages[0] < self.meta.next_pgno):
                raise self._bad(tree.root, "a record of the free list is damaged")
            seen += count
            yield pages
        if seen > self.meta.next_pgno:
            raise self._bad(tree.root, "the free list names more pages than there are")

    def check_extent(self, node: Node) -> None:
        """A big value's overflow pages: the header says so, and they lie within the file."""
        if not node.flags & _BIG:
            return
        header = self._read(node.pgno, HEADER)
        pgno, _, flags, low, high = _PAGE.unpack(header)
        pages, wanted = low | high << 16, (HEADER - 1 + node.size) // self.meta.page_size + 1
        if pgno != node.pgno or flags != _OVERFLOW or pages < wanted or node.pgno + pages > self.meta.next_pgno:
            raise self._bad(node.pgno, "it does not begin the value it should")

    def value(self, node: Node) -> bytes:
        """A copy of a node's value; its extent must have been checked."""
        if not node.flags & _BIG:
            return node.inline
        data = self._pread(node.size, node.pgno * self.meta.page_size + HEADER)
        if len(data) != node.size:
            raise self._bad(node.pgno, "it lies behind the end of the file")
        return data

    def page_at(self, pgno: int, tree: Tree) -> Branch | Leaf:
        page = self._pages.get(pgno)
        if page is None:
            page = self._pages[pgno] = self._parse(pgno, tree)
        return page

    def _page_within(self, pgno: int, tree: Tree, bounds: Bounds) -> Branch | Leaf:
        """The page, its keys where the branches above it say: else a look-up would pass a record by."""
        page = self.page_at(pgno, tree)
        keys = page.keys[1:] if isinstance(page, Branch) else page.keys
        (low, high), flip = bounds, -1 if tree is self.meta.free else 1  # its keys are integers, little-endian
        if keys and (keys[0][::flip] < low[::flip] or (high is not None and keys[-1][::flip] >= high[::flip])):
            raise self._bad(pgno, "it holds keys that are not looked for in it")
        return page

    def _parse(self, pgno: int, tree: Tree) -> Branch | Leaf:
        data, size = self._read(pgno, self.meta.page_size), self.meta.page_size
        number, _, flags, lower, upper = _PAGE.unpack_from(data)
        count = (lower - HEADER) >> 1
        branch = flags == _BRANCH
        if number != pgno or not (branch or flags == _LEAF) or lower & 1 or not HEADER < lower <= upper <= size:
            raise self._bad(pgno, "its header is damaged")
        if branch and count < 2 and tree is not self.meta.free:
            raise self._bad(pgno, "it is a branch of one")
        pointers = struct.unpack_from(f"<{count}H", data, HEADER)
        if min(pointers) < upper or max(pointers) + _NODE.size > size:
            raise self._bad(pgno, "a node lies outside of it")
        page, ends = (self._parse_branch if branch else self._parse_leaf)(pgno, data, pointers)
        self._check_packed(pgno, sorted(zip(pointers, ends, strict=True)), upper)
        self._check_order(pgno, page.keys[1:] if branch else page.keys, tree)
        return page

    def _parse_branch(self, pgno: int, data: bytes, pointers: Sequence[int]) -> tuple[Branch, list[int]]:
        """The page, and where each node ends."""
        keys: list[bytes] = []
        children: list[int] = []
        ends: list[int] = []
        for at in pointers:
            low, middle, high, key_size = _NODE.unpack_from(data, at)
            end = at + _NODE.size + key_size
            keys.append(data[at + _NODE.size : end])
            children.append(low | middle << 16 | high << 32)
            ends.append(end)
        if min(children) < 2 or max(children) >= self.meta.next_pgno:
            raise self._bad(pgno, "a node names a page that is not there")
        return Branch([b"", *keys[1:]], children), ends

    def _parse_leaf(self, pgno: int, data: bytes, pointers: Sequence[int]) -> tuple[Leaf, list[int]]:
        """The page, and where each node ends."""
        size, num_pages = len(data), self.meta.next_pgno
        nodes: list[Node] = []
        ends: list[int] = []
        for at in pointers:
            low, high, flags, key_size = _NODE.unpack_from(data, at)
            body = at + _NODE.size + key_size
            value_size = low | high << 16
            end = body + (_NUMBER.size if flags == _BIG else value_size)
            if end > size or not 1 <= key_size <= 511 or flags not in (0, _BIG, _SUBTREE):
                raise self._bad(pgno, "a node of it is damaged")
            key, inline, first = data[at + _NODE.size : body], data[body:end], 0
            if flags == _BIG:
                inline, (first,) = b"", _NUMBER.unpack(inline)
                if not 2 <= first < num_pages:
                    raise self._bad(pgno, "a node names a page that is not there")
            nodes.append(Node(key, value_size, inline, first, flags))
            ends.append(end)
        return Leaf([node.key for node in nodes], nodes), ends

    def _check_packed(self, pgno: int, nodes: Sequence[tuple[int, int]], upper: int) -> None:
        """Nodes (start, end), in order, fill a page from `upper` to its end without a gap; LMDB's moves rely on it."""
        at = upper
        for start, end in nodes:
            if start != at:
                raise self._bad(pgno, "its nodes overlap or leave a gap")
            at = end + (end & 1)
        if at != self.meta.page_size:
            raise self._bad(pgno, "its nodes overlap or leave a gap")

    def _check_order(self, pgno: int, keys: list[bytes], tree: Tree) -> None:
        order = [k[::-1] for k in keys] if tree is self.meta.free else keys  # integers, little-endian
        if any(a >= b for a, b in itertools.pairwise(order)):
            raise self._bad(pgno, "its keys are out of order")

    def _read(self, pgno: int, size: int) -> bytes:
        if not 2 <= pgno < self.meta.next_pgno:
            raise self._bad(pgno, "there is no such page")
        data = self._pread(size, pgno * self.meta.page_size)
        if len(data) != size:
            raise self._bad(pgno, "it lies behind the end of the file")
        return data

    def _pread(self, size: int, offset: int) -> bytes:
        try:
            return os.pread(self._handle, size, offset)
        except OSError as error:
            raise StoreIOError(
                f"reading the store at {self._where} failed: {error}", "check the disk (dmesg names bad sectors)"
            ) from error

    def _bad(self, pgno: int, reason: str) -> StoreCorrupt:
        return StoreCorrupt(
            f"the store at {self._where} is damaged: page {pgno}: {reason}", "run: cacheblend chunks verify --repair"
        )


def _tree(data: bytes, at: int) -> Tree:
    _, flags, depth, branches, leaves, overflow, entries, root = _TREE.unpack_from(data, at)
    return Tree(root, depth, entries, flags, branches + leaves + overflow)
