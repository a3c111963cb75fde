"""All-reduce: every step uses the mean gradient of all ranks, as DistributedDataParallel and Horovod do.

Choose it first, and whenever the links are fast enough: it is exact, and what all others are compared with.

  sordino run -np 4 -- python examples/with_allreduce.py
"""

from minimal import train
from sordino.algorithms import AllReduce

if __name__ == "__main__":
    train(AllReduce())
