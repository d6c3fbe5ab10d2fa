// The kernels for AVX-512. Compiled with
// -mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c -mprefer-vector-width=512.
#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || \
    !defined(__AVX512DQ__) || !defined(__F16C__)
#error "kernels_avx512.cc needs -mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c"
#endif
#define RINGCOMM_ISA kernels_avx512
#include "reduce/kernels.inc.h"
#endif
