"""Hierarchical local SGD, the source of this folder's claims."""

from claims.claim import Paper

PAPER = Paper(
    "hierarchical-local-sgd",
    "Local SGD",
    "Hierarchical local SGD: groups train local models, which are averaged now and then",
    "In local SGD P groups of workers train a local model each, and average the P models every I steps, instead "
    "of gradients in every step. So P models see P mini-batches of B images in the time of one, and take P times "
    "fewer steps in an epoch. The source cuts each model into K shards, one for each worker of a group: a worker "
    "averages its own shard with the other groups, which takes 1/K of the bytes between nodes. D is the mean "
    "distance between the local models and their mean, before it is taken; the source chooses P by it.",
    "The source trains ResNet-20 on CIFAR-10 for 200 epochs and EDSR (40.7 M parameters) on DIV2K for 1200, on up "
    "to 128 nodes. Here three linear layers learn Fashion-MNIST, and EDSR's architecture with 2 residual blocks "
    "of 16 channels doubles the resolution of its images. Local mini-batches (128 and 16), intervals (8 and 4), "
    "the number of local models (up to 32 and 16), the rules for the learning rate and the gradual warm-up are "
    "the source's. Every local model is a thread with the real optimizer; what is tested is their mean.",
)
