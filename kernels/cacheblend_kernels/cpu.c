/* Operations between the products of a step on a CPU, each in one pass. compiled.py calls them through ctypes, without the GIL, on
   contiguous arrays. Results depend neither on the number of threads nor on other rows.

   A vector has LANES floats, as many as a register holds: longer vectors would stay in memory, and attention would take ten times as
   long. LANES is 16 for AVX-512, 8 in cpu_avx2.c (the same code), and 4 on other processors.

   Each function takes one structure, packed by Python's `struct` in the same order: a product displaces everything
   else from the caches, so the cost of the next call is the memory that it touches. */

#include "cpu/vectors.h"

#include "cpu/gguf_blocks.h"

#include "cpu/activations.h"
#include "cpu/decode_attention.h"
#include "cpu/decode_product.h"
#include "cpu/mapped_files.h"
#include "cpu/norms.h"
#include "cpu/prefill_attention.h"
#include "cpu/prefill_floats.h"
#include "cpu/prefill_integers.h"
#include "cpu/prefill_product.h"
#include "cpu/rope.h"
#include "cpu/stored_kv.h"
