// Compiled with -mavx2 -mf16c.
#define SORDINO_LEVEL avx2
#include "kernels/cpu/impl.h"
