// The kernels for AVX2 with F16C. Compiled with -mavx2 -mf16c.
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__F16C__)
#error "kernels_avx2.cc needs -mavx2 -mf16c"
#endif
#define RINGCOMM_ISA kernels_avx2
#include "reduce/kernels.inc.h"
#endif
