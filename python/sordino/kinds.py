"""Operation codes of the core as plain integers: torch.compile can trace those, and cannot trace the core's enum."""

from sordino._core import Kind

ALLREDUCE = int(Kind.ALLREDUCE)
BROADCAST = int(Kind.BROADCAST)
ALLGATHER = int(Kind.ALLGATHER)
ALLTOALL = int(Kind.ALLTOALL)
REDUCESCATTER = int(Kind.REDUCESCATTER)
BARRIER = int(Kind.BARRIER)
JOIN = int(Kind.JOIN)
ADD_SET = int(Kind.ADD_SET)
REMOVE_SET = int(Kind.REMOVE_SET)
