"""Scheduled pull gossip: each rank pulls another's model in the background and averages it in on arrival.

Choose it between sites with slow and different links: no rank waits for another, training continues without lost ranks,
and a schedule keeps two pulls from sharing a link. The models of the ranks differ until the end.

  sordino run -np 4 -- python examples/with_scheduled_pull.py
"""

from minimal import train
from sordino.algorithms import ScheduledPull

if __name__ == "__main__":
    train(ScheduledPull())
