"""Operation codes of the core as integers, because torch.compile cannot trace the core's enum."""

from sordino._core import Opcode

ALLREDUCE = int(Opcode.ALLREDUCE)
BROADCAST = int(Opcode.BROADCAST)
ALLGATHER = int(Opcode.ALLGATHER)
ALLTOALL = int(Opcode.ALLTOALL)
REDUCESCATTER = int(Opcode.REDUCESCATTER)
BARRIER = int(Opcode.BARRIER)
JOIN = int(Opcode.JOIN)
ADD_SET = int(Opcode.ADD_SET)
REMOVE_SET = int(Opcode.REMOVE_SET)
