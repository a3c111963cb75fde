"""All collective operations of Sordino against MPI, Gloo and Horovod; see sordino.bench.collectives."""

import sys

from sordino.bench.collectives import main
from timings.collectives.hosts import contestants

if __name__ == "__main__":
    sys.exit(main(on_hosts=contestants))
