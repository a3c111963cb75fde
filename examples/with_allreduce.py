"""All-reduce: every step uses the mean gradient of all ranks, like DistributedDataParallel and Horovod.

Choose it first, and whenever the links are fast enough. It is exact, and the reference for all other algorithms.

  sordino run -np 4 -- python examples/with_allreduce.py
"""

from minimal import train
from sordino.algorithms import AllReduce

if __name__ == "__main__":
    train(AllReduce())
