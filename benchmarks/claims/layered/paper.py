"""Layered SGD, the source of this folder's claims."""

from claims.claim import Paper

PAPER = Paper(
    "layered-sgd",
    "Layered SGD",
    "Layered SGD: the all-reduce between nodes hides behind loading the next mini-batch",
    "In conventional synchronous SGD all workers average gradients after backward, and nothing else happens "
    "meanwhile. Layered SGD adds them up within each node, lets one communicator a node average the sums between "
    "nodes while workers load their next mini-batch, and takes the step before they compute on it. The arithmetic "
    "is the same; what the network takes is hidden as long as it is shorter than loading. Scaling efficiency is "
    "the throughput of a worker among many over that of a worker on one node.",
    "The source trains ResNet-50 on ImageNet by up to 256 GPUs (NVIDIA GK210) on 64 nodes with InfiniBand EDR. "
    "Here up to 8 workers on emulated hosts are timed; what 256 would take is computed by the cost functions of "
    "`sordino plan`, with constants that are measured here or follow from the source's description of its "
    "hardware, none of them fitted to its results. Accuracies are of three linear layers on Fashion-MNIST, by 32 "
    "workers that are threads.",
)
