"""Scheduled pull gossip, the source of this folder's claims."""

from claims.claim import Paper

PAPER = Paper(
    "wan-gossip-scheduling",
    "Scheduled gossip",
    "Scheduled pull gossip: models that arrive just when they are averaged",
    "The source trains VGG16 on CIFAR-100 and Network in Network on Fashion-MNIST by 8 workers, on a GPU, in a simulator "
    "that really trains and computes what transfers take. `sordino simulate` is that simulator. Here a small convolutional "
    "network learns a part of Fashion-MNIST, at a higher learning rate, so that it is at its plateau after minutes and not "
    "after thousands of passes; the test images are all there. What decides how much can be hidden is kept: 8 workers, "
    "windows of 16 steps, 1 and 10 Gbps, 5 ms, and the source's bytes of a model. Its seconds of a step are in a figure "
    "alone (Figure 3), of which the text says the order; ours are chosen so that it is the same.",
)
