"""Scheduled pull gossip, the source of this folder's claims."""

from claims.claim import Paper

PAPER = Paper(
    "wan-gossip-scheduling",
    "Scheduled gossip",
    "Scheduled pull gossip: models that arrive just when they are averaged",
    "Workers in several places gossip: after a window of T steps each pulls a peer's model and averages it with "
    "its own. Without overlap it waits for the pull; naive overlap begins the pull when the window begins, so "
    "that the model that arrives is a window old. Scheduled pulls begin as late as they can to arrive when the "
    "window ends. A manager may say who pulls when from whom, or the workers agree among themselves (autonomous). "
    "Wide links are the faster ones.",
    "The source trains VGG16 on CIFAR-100 and Network in Network on Fashion-MNIST by 8 workers, on a GPU, in a "
    "simulator that really trains and computes what transfers take. `sordino simulate` is that simulator. Here a "
    "small convolutional network learns a part of Fashion-MNIST at a higher learning rate, so that it comes to "
    "its plateau in a minute of a core; the source's 10,000 s are thousands of passes over its images. What "
    "decides how much can be hidden is kept: 8 workers, windows of 16 steps, 1 and 10 Gbps, 5 ms, and the "
    "source's bytes of a model. A step's seconds are in a picture alone (Figure 3), of which the text says the "
    "order; ours are chosen in that order.",
)
