/* Operations between the products of a step on a CPU, each in one pass. compiled.py calls them through ctypes, without the GIL, on
   contiguous arrays. Results depend neither on the number of threads nor on other rows.

   A vector has LANES floats, as many as a register: longer ones are kept in memory, and attention then takes ten times as long. 16 is
   for AVX-512; cpu_avx2.c compiles the same code with 8; other processors have 4.

   Each function takes one structure, packed by Python's `struct` in the same order: after a product, whose weights have displaced
   everything else from the caches, a call costs as much as the memory that it touches. */

#include "cpu/vectors.h"

#include "cpu/activations.h"
#include "cpu/decode_attention.h"
#include "cpu/gguf_blocks.h"
#include "cpu/norms.h"
#include "cpu/prefill_attention.h"
#include "cpu/products.h"
#include "cpu/rope.h"
#include "cpu/stored_kv.h"
