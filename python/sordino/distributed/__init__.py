"""The backend "sordino" of torch.distributed: `init_process_group("sordino")`, then DDP, FSDP2 and others unchanged.

    group.py        the process group that torch calls, and its registration
    collectives.py  the operations, in terms of this library's own
    work.py         what torch waits for
"""

from sordino.distributed.group import SordinoProcessGroup, register

__all__ = ["SordinoProcessGroup", "register"]

register()
