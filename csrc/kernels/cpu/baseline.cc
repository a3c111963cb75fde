// The level that every CPU of the architecture has.
#define SORDINO_LEVEL baseline
#include "kernels/cpu/impl.h"
