"""Scheduled pull gossip: each rank pulls another's model in the background and averages it in when it has arrived.

Choose it between sites whose links are slow and differ: nobody waits for anybody, ranks that die are left out, and a
schedule keeps two pulls from sharing a link. The models of the ranks differ until the end.

  sordino run -np 4 -- python examples/with_scheduled_pull.py
"""

from minimal import train
from sordino.algorithms import ScheduledPull

if __name__ == "__main__":
    train(ScheduledPull())
