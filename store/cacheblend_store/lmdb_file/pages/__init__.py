"""Read data.mdb without LMDB, checking every number before it is used.

LMDB trusts its own file: a flipped bit can make it read outside of the map, which kills the process with a signal. So
the store reads only with `pread` and these modules. LMDB walks pages only to write, after the pages on its way were
checked here. For reading, LMDB only provides the slot in its reader table, which protects the pages of a snapshot from
being overwritten. Layout: LMDB 0.9, 64-bit, little-endian (mdb.c: MDB_page, MDB_node, MDB_db, MDB_meta).

`layout` parses pages, `commits` reads the two meta pages, `reader` does look-ups in one commit.
"""
