"""Papers whose claims are tested here, and Sordino as the source of its own claims."""

from claims.claim import Paper

CROSSOVER = Paper(
    "crossover-sgd",
    "Crossover-SGD",
    "Crossover-SGD: gossip by segments, over load-balanced random peers",
    "AllReduce averages the gradients of all workers in every step, so all have the same model. In gossip each worker "
    "takes its own step and then averages its model with that of another worker. SGP sends the whole model to one peer "
    "after the other of a fixed graph. Crossover-SGD cuts the model into segments and sends each segment to another "
    "peer. Peers are drawn at random in every step, so that all workers send and receive the same number of segments. "
    "The hierarchical form averages gradients within groups and gossips between groups. A global mini-batch holds the "
    "images of one step of all workers.",
    "The source trains ResNet-50 on ImageNet, with mini-batches of up to 86,016 (a fifteenth of all images) and up to "
    "56 workers. Here three linear layers, each of which is a segment, learn 12,288 images of Fashion-MNIST for 84 "
    "epochs, with mini-batches of up to 2048 (a sixth of the images), which leaves 504 steps. Every worker is a thread "
    "with the real optimizer, and the mean of the workers' models is tested.",
)
LAYERED = Paper(
    "layered-sgd",
    "Layered SGD",
    "Layered SGD: the all-reduce between nodes hides behind loading the next mini-batch",
    "In conventional synchronous SGD all workers average gradients after backward and do nothing else meanwhile. "
    "Layered SGD adds the gradients within each node. One communicator per node averages the sums between nodes while "
    "workers load their next mini-batch. The step is taken before they compute on it. The arithmetic is the same, and "
    "communication is hidden as long as it is shorter than loading. Scaling efficiency is the throughput per worker "
    "over that of a worker on one node.",
    "The source trains ResNet-50 on ImageNet with up to 256 GPUs (NVIDIA GK210) on 64 nodes with InfiniBand EDR. Here "
    "up to 8 workers on emulated hosts are timed. The times of 256 workers are computed by the cost functions of "
    "`sordino plan`. Their constants are measured here or follow from the source's description of its hardware; none "
    "is fitted to its results. Accuracies are of three linear layers on Fashion-MNIST, with 32 workers that are "
    "threads.",
)
CAPS = Paper(
    "caps-learning",
    "CaPS-Learning",
    "CaPS-Learning: parameters that have stopped changing are not sent",
    "Towards the end of a training many parameters almost stop changing. CaPS-Learning measures the share of each "
    "layer's parameters that a step left unchanged, and does not send layers in which that share is above a threshold. "
    "All other layers are averaged among the workers. Naive detection compares all parameters, random detection a "
    "sample of them, and history-based detection those that have changed most often. A scheduler changes the threshold "
    "with the loss.",
    "The source trains AlexNet and ResNet-50 on CIFAR-10 on eight GPUs, with mini-batches of 32 each, for up to 100 "
    "epochs. Here a small network of each kind (two convolutions and two linear layers with dropout; residual blocks "
    "with batch normalization) learns a few thousand images of Fashion-MNIST, with four workers and mini-batches of 32 "
    "each, for at least 20 epochs. Whether a parameter counts as unchanged depends on the comparison, which the source "
    "does not state. So three comparisons are tested: bit for bit, rounded to four digits, and rounded to three. "
    "Shares are those of the first worker, as in the source. Step times are of ResNet-50's 161 parameters at half of "
    "its widths.",
)
LOCAL_SGD = Paper(
    "hierarchical-local-sgd",
    "Local SGD",
    "Hierarchical local SGD: groups train local models, which are averaged at intervals",
    "In local SGD P groups of workers train one local model each. They average the P models every I steps, instead of "
    "gradients in every step. So P models see P mini-batches of B images in the time of one, and take P times fewer "
    "steps in an epoch. The source cuts each model into K shards, one for each worker of a group: a worker averages "
    "its own shard with the other groups, which takes 1/K of the bytes between nodes. D is the mean distance between "
    "the local models and their mean before an averaging; the source chooses P by it.",
    "The source trains ResNet-20 on CIFAR-10 for 200 epochs and EDSR (40.7 M parameters) on DIV2K for 1200, on up to "
    "128 nodes. Here three linear layers learn Fashion-MNIST, and EDSR's architecture with 2 residual blocks of 16 "
    "channels doubles the resolution of its images. Local mini-batches (128 and 16), intervals (8 and 4), the number "
    "of local models (up to 32 and 16), the rules for the learning rate and the gradual warm-up are the source's. "
    "Every local model is a thread with the real optimizer, and the mean of the local models is tested.",
)
SCHEDULED_PULL = Paper(
    "wan-gossip-scheduling",
    "Scheduled gossip",
    "Scheduled pull gossip: models that arrive just before they are averaged",
    "Workers in several places gossip: after a window of T steps each pulls a peer's model and averages it with its "
    "own. Without overlap it waits for the pull. Naive overlap begins the pull when the window begins, so the model "
    "that it averages is a window old. Scheduled pulls begin as late as possible to end with the window. The schedule "
    "is made by a manager, or agreed on among the workers (autonomous). Wide links are the faster ones.",
    "The source trains VGG16 on CIFAR-100 and Network in Network on Fashion-MNIST with 8 workers, on a GPU, in a "
    "simulator that really trains and computes the times of transfers. `sordino simulate` is such a simulator. Here a "
    "small convolutional network learns a part of Fashion-MNIST at a higher learning rate, so that it reaches its "
    "plateau in a minute on one core; the source's 10,000 s are thousands of passes over its images. The settings that "
    "decide how much can be hidden are kept: 8 workers, windows of 16 steps, 1 and 10 Gbps, 5 ms, and the source's "
    "bytes of a model. The source shows the seconds of a step only in a picture (Figure 3), and its text gives the "
    "order; ours are chosen in that order.",
)
SORDINO = Paper(
    "sordino",
    "Sordino",
    "Sordino: its own claims",
    "Promises of Sordino beyond the papers, as measured claims.",
    "Only the machine is smaller: two ranks on two cores. `docs/benchmarks.md` leads to more detailed results.",
    speaker="Our claim",
)
