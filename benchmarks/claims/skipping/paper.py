"""CaPS-Learning, the source of this folder's claims."""

from claims.claim import Paper

PAPER = Paper(
    "caps-learning",
    "CaPS-Learning",
    "CaPS-Learning: parameters that have stopped changing are not sent",
    "The source trains AlexNet and ResNet-50 on CIFAR-10 on eight GPUs, mini-batches of 32 each, for up to 100 "
    "epochs. Here a small network of each kind (two convolutions and two linear layers with dropout; residual blocks "
    "with batch normalization) learns some thousand images of Fashion-MNIST, by four workers with mini-batches of 32 "
    "each, for at least 20 epochs. What the source calls unchanged depends on how parameters are compared, which it "
    "does not say, so that is varied: bit for bit, or rounded to four or to three digits. Shares are those of the "
    "first worker, as in the source. Step times are of ResNet-50's 161 parameters, at half of its widths.",
)
