"""Crossover-SGD, the source of this folder's claims."""

from claims.claim import Paper

PAPER = Paper(
    "crossover-sgd",
    "Crossover-SGD",
    "Crossover-SGD: gossip by segments, over load-balanced random peers",
    "AllReduce averages the gradients of all workers in every step, so that all have the same model. In gossip "
    "each worker takes a step of its own and then averages its model with one other worker's; SGP sends the whole "
    "model to one peer after the other of a fixed graph. Crossover-SGD cuts the model into segments and sends "
    "each to another peer, drawn at random in every step such that everybody sends and receives equally much. Its "
    "hierarchical form averages gradients within groups and gossips between them. A global mini-batch is what all "
    "workers compute on in a step together.",
    "The source trains ResNet-50 on ImageNet, with mini-batches of up to 86,016 (a fifteenth of all images) and "
    "up to 56 workers. Here three linear layers, each of which is a segment, learn 12,288 images of Fashion-MNIST "
    "for 84 epochs, with mini-batches of up to 2048 (a sixth), so that the largest has 504 steps; every worker is "
    "a thread with the real optimizer, and what is tested is the mean of the workers' models.",
)
