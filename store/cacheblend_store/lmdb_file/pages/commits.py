"""Read and check the two meta pages, which identify the latest commits of a file."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from cacheblend_store.errors import StoreCorrupt, StoreFormat
from cacheblend_store.lmdb_file.pages.layout import NO_PAGE, PAGE_SIZES, Meta, parse_meta
from cacheblend_store.lmdb_file.pages.reader import DATABASES, PageReader
from cacheblend_store.lmdb_file.translation import again_hint, bad_disk, damaged


def read_metas(handle: int, store: Path) -> tuple[Meta, Meta]:
    """Return the older and the newer meta page. Commits write them alternately. Raises StoreCorrupt, StoreFormat. LMDB
    trusts the meta pages as soon as it opens the file, so they are checked first."""
    try:
        return _read_metas(handle, store)
    except StoreCorrupt:
        time.sleep(0.001)  # another process may have committed between the two reads
        return _read_metas(handle, store)


def _read_metas(handle: int, store: Path) -> tuple[Meta, Meta]:
    size = os.fstat(handle).st_size
    if size < 2 * PAGE_SIZES[0]:
        raise damaged(store, f"its file was truncated to {size} bytes")
    first = _meta_at(handle, 0, store)
    second = _meta_at(handle, first.page_size if first else PAGE_SIZES[0], store)
    if first is None and second is None:
        raise StoreFormat(f"{store / 'data.mdb'} is not an LMDB file", "name another --store")
    if first is None or second is None or first.page_size != second.page_size:
        raise damaged(store, "a meta page cannot be decoded")
    new_file = first.txnid in (0, 1) and second.txnid in (0, 1)
    in_turn = abs(first.txnid - second.txnid) == 1 and first.txnid % 2 == 0
    if not (new_file or in_turn):
        raise damaged(store, "the two meta pages do not belong together")
    return (first, second) if first.txnid < second.txnid else (second, first)


def snapshot(handle: int, store: Path, txnid: int | None = None) -> PageReader | None:
    """Return the pages of a commit, by default the newest; None if later commits have overwritten its meta page. Raises
    StoreCorrupt if the meta pages are damaged or the file ends before pages that are in use."""
    older, newest = read_metas(handle, store)
    pages, size = PageReader(handle, newest, store), os.fstat(handle).st_size
    needed = newest.next_pgno * newest.page_size
    if newest.next_pgno > 2 and needed > size and not _ends_in_free_pages(pages, size):
        raise damaged(store, f"its file has {size} bytes, but its index names {needed}: it was truncated")
    if txnid in (None, newest.txnid):
        return pages
    return PageReader(handle, older, store) if txnid == older.txnid else None


def newest(handle: int, store: Path) -> PageReader:
    """Return the pages of the newest commit. Raises StoreCorrupt, StoreFormat."""
    pages = snapshot(handle, store)
    assert pages is not None, "the newest commit is always there"
    return pages


def check_index(handle: int, pages: PageReader) -> None:
    """Check an open file once: the meta pages belong to the commits that they name, and all databases exist."""
    older, newest = read_metas(handle, pages.store)
    _check_unused(PageReader(handle, older, pages.store), newest.txnid)
    _check_commit(pages)
    if pages.meta.main.root == NO_PAGE:
        return
    names = [node.key.decode(errors="replace") for node in pages.nodes_in(pages.meta.main)]
    if not any(name in names for name in DATABASES):
        raise StoreFormat(f"{pages.store} is an LMDB file, not a cacheblend store", "name another --store")
    for name in names:
        pages.tree(name)


def salvageable(handle: int, store: Path) -> PageReader:
    """Return the newest commit of a damaged file, or the one before it if the newest one's roots cannot be read.

    The file size is not checked; pages beyond the end of the file cannot be read. Raises StoreCorrupt without a meta
    page.
    """
    found = []
    for meta in filter(None, (_meta_at(handle, offset, store) for offset in (0, *PAGE_SIZES))):
        pages, freed, num_roots = PageReader(handle, meta, store), 0, 0
        with suppress(StoreCorrupt):
            freed = pages.last_freed()
        for name in DATABASES:
            with suppress(StoreCorrupt):
                tree = pages.tree(name)
                num_roots += tree is not None and (tree.root == NO_PAGE or bool(pages.page_at(tree.root, tree)))
        found.append((num_roots, freed, meta.txnid, pages))
    if not found:
        raise StoreCorrupt(f"nothing in the store at {store} can be read, so nothing can be rescued", again_hint(store))
    return max(found, key=lambda entry: entry[:3])[3]


def _check_commit(pages: PageReader) -> None:
    """Check that a meta page belongs to the commit that it names.

    Every commit frees the pages that it replaced under its own number, which then is the last key of the free list. A
    meta page with a damaged number can look like the newest, or make the other one look newest, and a commit would be
    lost.
    """
    number = pages.meta.txnid
    if number > 2 and pages.last_freed() != number:
        raise damaged(pages.store, f"page {number & 1}: it does not belong to the commit that it names")


def _check_unused(older: PageReader, newest: int) -> None:
    """Check that the older meta page is not the newest one with a damaged number, which would hide the last commit.

    A failed commit leaves a valid older page whose number does not match its trees: LMDB writes the number of the
    second-last commit over a page that already names the trees of the failed commit, which may not have reached the
    disk. That number differs from the failed commit's in more than one bit, which a single bit flip cannot cause.
    """
    try:
        freed = older.last_freed()
    except StoreCorrupt:
        return  # no reader uses it, so its pages may have been reused
    failed, number = newest + 1, older.meta.txnid
    if not (freed == failed and number == newest - 1 and (failed ^ number).bit_count() > 1):
        _check_commit(older)


def _ends_in_free_pages(pages: PageReader, size: int) -> bool:
    """Return whether all pages beyond the end of the file are free. A commit does not write pages that it appended and
    then freed itself. Such pages are written before they are read again."""
    end, free = size // pages.meta.page_size, set[int]()
    try:
        for freed in pages.free_pages():
            free.update(page for page in freed if page >= end)
    except StoreCorrupt:
        return False
    return all(page in free for page in range(end, pages.meta.next_pgno))  # ends at the first that is not


def _meta_at(handle: int, offset: int, store: Path) -> Meta | None:
    try:
        return parse_meta(os.pread(handle, PAGE_SIZES[0], offset))
    except OSError as error:
        raise bad_disk(store, error) from error
