"""CaPS-Learning, the source of this folder's claims."""

from claims.claim import Paper

PAPER = Paper(
    "caps-learning",
    "CaPS-Learning",
    "CaPS-Learning: parameters that have stopped changing are not sent",
    "Towards the end of a training many parameters hardly change. CaPS-Learning looks at what share of each "
    "layer's parameters a step has left unchanged, and does not send layers in which that share is above a "
    "threshold; all others are averaged among the workers. Naive detection compares all parameters, random "
    "detection a sample of them, and history-based detection those that have changed most often. A scheduler "
    "moves the threshold by the course of the loss.",
    "The source trains AlexNet and ResNet-50 on CIFAR-10 on eight GPUs, mini-batches of 32 each, for up to 100 "
    "epochs. Here a small network of each kind (two convolutions and two linear layers with dropout; residual "
    "blocks with batch normalization) learns some thousand images of Fashion-MNIST, by four workers with mini-batches "
    "of 32 each, for at least 20 epochs. What the source calls unchanged depends on how parameters are "
    "compared, which it does not say, so that is varied: bit for bit, or rounded to four or to three digits. "
    "Shares are those of the first worker, as in the source. Step times are of ResNet-50's 161 parameters, at "
    "half of its widths.",
)
