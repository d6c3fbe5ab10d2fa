// The kernels for any machine: whatever the compiler's own target offers.
#define RINGCOMM_ISA kernels_plain
#include "reduce/kernels.inc.h"
