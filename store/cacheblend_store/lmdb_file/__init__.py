"""The LMDB file: opening, locks, pages checked before LMDB walks them."""
