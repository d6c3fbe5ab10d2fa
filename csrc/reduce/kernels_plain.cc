// The kernels for any machine, with the instructions of the compiler's own target.
#define RINGCOMM_ISA kernels_plain
#include "reduce/kernels.inc.h"
