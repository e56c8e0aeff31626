"""The LMDB file: opening it, locking it, and checking its pages before LMDB walks them."""
