/* cpu.c for CPUs without AVX-512. */
#define LANES 8
#include "cpu.c"
