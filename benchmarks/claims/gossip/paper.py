"""Crossover-SGD, the source of this folder's claims."""

from claims.claim import Paper

PAPER = Paper(
    "crossover-sgd",
    "Crossover-SGD",
    "Crossover-SGD: gossip by segments, over load-balanced random peers",
    "The source trains ResNet-50 on ImageNet, with mini-batches of up to 86,016 (a fifteenth of all images) and up to "
    "56 "
    "workers. Here three linear layers, each of which is a segment, learn 12,288 images of Fashion-MNIST for 84 "
    "epochs, "
    "with mini-batches of up to 2048 (a sixth), so that the largest has 504 steps; every worker is a thread with the "
    "real "
    "optimizer, and what is tested is the mean of the workers' models.",
)
