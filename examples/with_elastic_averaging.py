"""Elastic averaging (EASGD): every few steps each rank is drawn towards a centre, and the centre towards the ranks.

Choose it where ranks are to explore apart from each other for longer than local SGD lets them.

  sordino run -np 4 -- python examples/with_elastic_averaging.py
"""

from minimal import train
from sordino.algorithms import ElasticAveraging

if __name__ == "__main__":
    train(ElasticAveraging(interval=4))
