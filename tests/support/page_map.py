"""Map the pages of a store's file to their roles, to aim damage. Reads an undamaged file with the store's own
reader."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from cacheblend_store.lmdb_file.pages.commits import snapshot
from cacheblend_store.lmdb_file.pages.layout import NO_PAGE, Branch, Tree
from cacheblend_store.lmdb_file.pages.reader import DATABASES, PageReader


def page_map(data: Path) -> tuple[dict[str, list[int]], int]:
    """({"meta" | "branch" | "leaf" | "value" | "free list" | "free": page numbers}, page size)."""
    handle = os.open(data, os.O_RDONLY)
    try:
        pages = snapshot(handle, data.parent)
        assert pages is not None
        meta = pages.meta
        found: dict[str, list[int]] = defaultdict(list)
        found["meta"] = [0, 1]
        named = [pages.tree(name) for name in DATABASES]
        for tree in (meta.main, *(t for t in named if t is not None)):
            _walk(pages, tree, found)
        free: dict[str, list[int]] = defaultdict(list)
        _walk(pages, meta.free, free)
        found["free list"] = [n for pgnos in free.values() for n in pgnos]
        used = {n for pgnos in found.values() for n in pgnos}
        found["free"] = [n for n in range(meta.next_pgno) if n not in used]
        return dict(found), meta.page_size
    finally:
        os.close(handle)


def pages_by_level(data: Path, database: str) -> tuple[list[list[int]], int]:
    """(page numbers of a database's tree, from its root down, level by level; page size)."""
    with data.open("rb") as file:
        pages = snapshot(file.fileno(), data.parent)
        assert pages is not None
        meta, tree = pages.meta, pages.tree(database)
        assert tree is not None
        levels, level = list[list[int]](), [tree.root]
        while level:
            levels.append(level)
            found = [pages.page_at(pgno, tree) for pgno in level]
            level = [child for page in found if isinstance(page, Branch) for child in page.children]
        return levels, meta.page_size


def _walk(pages: PageReader, tree: Tree, found: dict[str, list[int]]) -> None:
    todo = [] if tree.root == NO_PAGE else [tree.root]
    while todo:
        pgno = todo.pop()
        page = pages.page_at(pgno, tree)
        if isinstance(page, Branch):
            found["branch"].append(pgno)
            todo += page.children
            continue
        found["leaf"].append(pgno)
        for node in map(page.node, range(len(page.keys))):
            if node.flags & 1:
                count = (15 + node.size) // pages.meta.page_size + 1
                found["value"] += range(node.pgno, node.pgno + count)
