// The level that every CPU of the architecture supports.
#define SORDINO_LEVEL baseline
#include "kernels/cpu/impl.h"
