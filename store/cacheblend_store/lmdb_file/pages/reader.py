"""Look up records in one snapshot of data.mdb."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from cacheblend_store.errors import StoreCorrupt
from cacheblend_store.lmdb_file.pages.layout import (
    HEADER,
    MAX_DEPTH,
    NO_PAGE,
    SUBTREE,
    Bounds,
    Branch,
    Leaf,
    Meta,
    Node,
    Tree,
    big_header,
    check_big,
    parse_free,
    parse_page,
    parse_tree,
)
from cacheblend_store.lmdb_file.translation import bad_disk, damaged

_LEAVES_HELD = 2048  # about 20 MB; a scan must not keep the whole store in memory
_NO_LEAF: tuple[None, Bounds] = (None, Bounds())
DATABASES = ("meta", "chunks", "blobs", "documents", "refs", "lru")


class PageReader:
    """Pages of one commit. Every page is checked before its contents are followed. Raises StoreCorrupt, which names the
    page. Not thread-safe: use one per transaction. store: the directory, for messages."""

    def __init__(self, handle: int, meta: Meta, store: Path) -> None:
        self.handle, self.meta, self.store = handle, meta, store  # descriptor: open as long as the snapshot
        self._branches: dict[int, Branch] = {}
        self._leaves: dict[int, Leaf] = {}
        self._trees: dict[str, Tree] = {}
        self._last: dict[Tree, tuple[Leaf, Bounds]] = {}  # per tree, the leaf found last: the next key is often close

    def tree(self, name: str) -> Tree | None:
        """Return the tree of a database, None if the database does not exist."""
        if name not in self._trees:
            node = self._find(self.meta.main, name.encode())
            if node is None:
                return None
            with self._checked(self.meta.main.root):
                self._trees[name] = parse_tree(node)
        return self._trees[name]

    def get(self, database: str, key: bytes) -> Node | None:
        """Return the node of a key, None if it is missing. Checks all pages on its path and its extent."""
        tree = self.tree(database)
        node = self._find(tree, key) if tree else None
        if node is not None:
            self.check_extent(node)
        return node

    def _find(self, tree: Tree, key: bytes) -> Node | None:
        if tree.root == NO_PAGE:
            return None
        leaf = self._leaf_of(tree, key)
        at = bisect_left(leaf.keys, key)
        return leaf.node(at) if at < len(leaf.keys) and leaf.keys[at] == key else None

    def nodes(self, database: str, start: bytes = b"", *, skip_damaged: bool = False) -> Iterator[Node]:
        """Yield a database's nodes from `start` on. skip_damaged: skip unreadable pages and all below them."""
        tree = self.tree(database)
        return self.nodes_in(tree, start, skip_damaged=skip_damaged) if tree else iter(())

    def nodes_in(self, tree: Tree, start: bytes = b"", *, skip_damaged: bool = False) -> Iterator[Node]:
        if tree.root != NO_PAGE:
            yield from self._nodes_below(tree, tree.root, Bounds(), start, skip_damaged, 1)

    def _nodes_below(
        self, tree: Tree, pgno: int, bounds: Bounds, start: bytes, skip_damaged: bool, depth: int
    ) -> Iterator[Node]:
        try:
            page = self._page_within(pgno, tree, bounds)
            if depth > MAX_DEPTH:
                raise self._bad(pgno, "the tree is deeper than possible")
        except StoreCorrupt:
            if skip_damaged:
                return
            raise
        if isinstance(page, Leaf):
            first = 0 if tree is self.meta.free else bisect_left(page.keys, start)  # keys of the free list are integers
            yield from map(page.node, range(first, len(page.keys)))
            return
        for at in range(page.at(start), len(page.children)):
            below = page.children[at], page.bounds(at, bounds)
            yield from self._nodes_below(tree, *below, start, skip_damaged, depth + 1)

    def check_extent(self, node: Node) -> None:
        """Check that a big value is where its node says. `get` does it for its nodes, `nodes` does not."""
        if node.big:
            header = self._read(node.pgno, HEADER)
            with self._checked(node.pgno):
                check_big(header, node, self.meta.page_size, self.meta.next_pgno)

    def value(self, node: Node) -> memoryview:
        """Return a copy of a node's value. Its extent must have been checked."""
        if not node.big:
            return memoryview(node.inline)
        buffer = memoryview(bytearray(node.size))
        self.read_into(node, [buffer])
        return buffer

    def read_into(self, node: Node, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers one after another with a node's value. Its extent must have been checked."""
        if node.big:
            self._fill(buffers, node.pgno, HEADER)
        else:
            rest = BytesIO(node.inline)
            for buffer in buffers:
                rest.readinto(buffer)

    def place(self, database: str, keys: Sequence[bytes], size: int) -> list[tuple[int, bytes]] | None:
        """Return the file offset and the header of the first page of each key's value, for `compiled_reads`; None
        unless all are big values of that size. keys: in order, best adjacent ones. The headers are expected, not read.
        """
        tree, found = self.tree(database), list[tuple[int, bytes]]()
        for key in keys:
            node = self._find(tree, key) if tree else None
            header = None if node is None else big_header(node, self.meta.page_size, self.meta.next_pgno)
            if node is None or header is None or node.size != size:
                return None
            found.append((node.pgno * self.meta.page_size, header))
        return found

    def used_bytes(self, database: str) -> int:
        """Return the page bytes of a database, from LMDB's counters."""
        tree = self.tree(database)
        return tree.num_pages * self.meta.page_size if tree else 0

    @property
    def free_bytes(self) -> int:
        """Bytes of free pages."""
        pages = self.meta.next_pgno - 2 - self.meta.main.num_pages - self.meta.free.num_pages
        return max(0, pages * self.meta.page_size - sum(map(self.used_bytes, DATABASES)))

    # pages that LMDB walks when it writes

    def check_beside(self, database: str, key: bytes) -> None:
        """Check the two pages on each side of the path to `key`, on every level and below any branch.

        When LMDB deletes a record, it may merge with these pages or borrow from them; merging branches brings their
        pages together, and a cursor can move on to the next page. A put walks only the path itself, which `get` checks.
        """
        tree = self.tree(database)
        if tree is None or tree.root == NO_PAGE:
            return
        self._leaf_of(tree, key)
        row, at = [(tree.root, Bounds())], 0  # the pages of a level, and the index of the one on the path
        for _ in range(tree.depth):
            below = list[tuple[int, Bounds]]()
            path = 0
            for number, (pgno, bounds) in enumerate(row):
                page = self._page_within(pgno, tree, bounds)
                if isinstance(page, Branch):
                    here = page.at(key)  # last child of a page before the path, first child of a page after it
                    near = range(max(0, here - 2), min(here + 3, len(page.children)))
                    path = len(below) + near.index(here) if number == at else path
                    below += ((page.children[i], page.bounds(i, bounds)) for i in near)
            row, at = below[max(0, path - 2) : path + 3], min(path, 2)

    def check(self) -> None:
        """Check every page of every tree and the extent of every big value, before LMDB walks all of them."""
        for node in self.nodes_in(self.meta.main):
            tree = self.tree(node.key.decode(errors="replace"))
            for inner in self.nodes_in(tree) if tree else ():
                self.check_extent(inner)
                if inner.flags == SUBTREE:
                    raise self._bad(tree.root if tree else 0, "one of its records looks like a tree")
        for _ in self.free_pages():
            pass

    def free_pages(self) -> Iterator[tuple[int, ...]]:
        """Yield the records of the free list, from which a write takes its pages."""
        tree, seen = self.meta.free, 0
        for node in self.nodes_in(tree):
            self.check_extent(node)
            with self._checked(tree.root):
                pages = parse_free(node.key, self.value(node), self.meta.next_pgno)
            seen += len(pages)
            yield pages
        if seen > self.meta.next_pgno:
            raise self._bad(tree.root, "the free list names more pages than there are")

    def last_freed(self) -> int:
        """Return the number of the last commit that freed pages, 0 for none."""
        tree = self.meta.free
        pgno, depth = tree.root, 0
        while pgno != NO_PAGE and depth < MAX_DEPTH:
            page, depth = self.page_at(pgno, tree), depth + 1
            if isinstance(page, Leaf):
                return int.from_bytes(page.keys[-1], "little")
            pgno = page.children[-1]
        return 0

    # pages

    def page_at(self, pgno: int, tree: Tree) -> Branch | Leaf:
        page: Branch | Leaf | None = self._branches.get(pgno) or self._leaves.get(pgno)
        if page is None:
            data = self._read(pgno, self.meta.page_size)
            with self._checked(pgno):
                page = parse_page(data, pgno, self.meta.next_pgno, integer_keys=tree is self.meta.free)
            if isinstance(page, Branch):
                self._branches[pgno] = page
            else:
                if len(self._leaves) >= _LEAVES_HELD:
                    del self._leaves[next(iter(self._leaves))]  # the oldest one
                self._leaves[pgno] = page
        return page

    def _leaf_of(self, tree: Tree, key: bytes) -> Leaf:
        """Return the leaf that would hold the key."""
        last, (low, high) = self._last.get(tree, _NO_LEAF)
        if last is not None and low <= key and (high is None or key < high):
            return last
        pgno, bounds = tree.root, Bounds()
        for depth in range(1, MAX_DEPTH + 1):
            page = self._page_within(pgno, tree, bounds)
            if isinstance(page, Leaf):
                if depth != tree.depth:
                    raise self._bad(pgno, f"it is at depth {depth} of a tree of depth {tree.depth}")
                self._last[tree] = page, bounds
                return page
            at = page.at(key)
            pgno, bounds = page.children[at], page.bounds(at, bounds)
        raise self._bad(pgno, "the tree is deeper than possible")

    def _page_within(self, pgno: int, tree: Tree, bounds: Bounds) -> Branch | Leaf:
        """Return the page. Raises StoreCorrupt if its keys are out of bounds, so that look-ups would miss."""
        page = self.page_at(pgno, tree)
        keys = page.keys[1:] if isinstance(page, Branch) else page.keys
        (low, high), flip = bounds, -1 if tree is self.meta.free else 1  # its keys are integers, little-endian
        if keys and (keys[0][::flip] < low[::flip] or (high is not None and keys[-1][::flip] >= high[::flip])):
            raise self._bad(pgno, "its keys are out of bounds")
        return page

    def _read(self, pgno: int, size: int) -> bytes:
        if not 2 <= pgno < self.meta.next_pgno:
            raise self._bad(pgno, "it does not exist")
        buffer = bytearray(size)
        self._fill([memoryview(buffer)], pgno, 0)
        return bytes(buffer)

    def _fill(self, buffers: Sequence[memoryview], pgno: int, start: int) -> None:
        """Read from the file, starting at byte `start` of a page."""
        try:
            count = os.preadv(self.handle, buffers, pgno * self.meta.page_size + start)
        except OSError as error:
            raise bad_disk(self.store, error) from error
        if count != sum(map(len, buffers)):
            raise self._bad(pgno, "it is beyond the end of the file")

    @contextmanager
    def _checked(self, pgno: int) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise self._bad(pgno, str(error)) from error

    def _bad(self, pgno: int, reason: str) -> StoreCorrupt:
        return damaged(self.store, f"page {pgno}: {reason}")
