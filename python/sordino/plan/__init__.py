"""`sordino plan`: choice of an algorithm and of the number of local models.

It measures the costs of the transport, predicts the time of each algorithm, and finds how many local models the rule of
Lee et al. allows (workers.py).
"""

from sordino.plan.costs import Cost, Line, Load, Phase, Rates, cost_of
from sordino.plan.links import fit, measure, nodes_of_ranks
from sordino.plan.predictions import Job, Prediction, candidates, predict, recommend, trial
from sordino.plan.workers import Task, Workers, choose, find_workers

__all__ = [
    "Cost",
    "Job",
    "Line",
    "Load",
    "Phase",
    "Prediction",
    "Rates",
    "Task",
    "Workers",
    "candidates",
    "choose",
    "cost_of",
    "find_workers",
    "fit",
    "measure",
    "nodes_of_ranks",
    "predict",
    "recommend",
    "trial",
]
