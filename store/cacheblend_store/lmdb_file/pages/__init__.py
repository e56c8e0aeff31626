"""Read data.mdb without LMDB, checking every number before it is used.

LMDB trusts its own file: a flipped bit can send it out of the map, which ends the process with a signal. So the store
reads with `pread` and these modules alone, and LMDB walks pages only to write, after the pages that it will walk were
checked here. LMDB's own part in reading is the slot in its table of readers, which keeps the pages of a snapshot from
being written over. Layout: LMDB 0.9, 64-bit, little-endian (mdb.c: MDB_page, MDB_node, MDB_db, MDB_meta).

`layout` parses pages, `commits` reads the two meta pages, `reader` does look-ups in one commit.
"""
