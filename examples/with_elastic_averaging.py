"""Elastic averaging (EASGD): every few steps each rank is drawn towards a center, and the center towards the ranks.

Choose it if ranks are to explore separately for longer than in local SGD.

  sordino run -np 4 -- python examples/with_elastic_averaging.py
"""

from minimal import train
from sordino.algorithms import ElasticAveraging

if __name__ == "__main__":
    train(ElasticAveraging(interval=4))
