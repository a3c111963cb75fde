// Compiled with -mavx512{f,bw,vl,dq} -mf16c and full-width vectors.
#define SORDINO_LEVEL avx512
#include "kernels/cpu/impl.h"
