/* cpu.c with vectors of 8 floats, for CPUs without AVX-512. */
#define LANES 8
#include "cpu.c"
