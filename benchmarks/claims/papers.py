"""The papers whose claims are tried here, and Sordino itself in the place of one."""

from claims.claim import Paper

CROSSOVER = Paper(
    "crossover-sgd",
    "Crossover-SGD",
    "Crossover-SGD: gossip by segments, over load-balanced random peers",
    "AllReduce averages the gradients of all workers in every step, so that all have the same model. In gossip each "
    "worker takes a step of its own and then averages its model with one other worker's; SGP sends the whole model to "
    "one peer after the other of a fixed graph. Crossover-SGD cuts the model into segments and sends each to another "
    "peer, drawn at random in every step such that everybody sends and receives equally much. Its hierarchical form "
    "averages gradients within groups and gossips between them. A global mini-batch is what all workers compute on in "
    "a step together.",
    "The source trains ResNet-50 on ImageNet, with mini-batches of up to 86,016 (a fifteenth of all images) and up to "
    "56 workers. Here three linear layers, each of which is a segment, learn 12,288 images of Fashion-MNIST for 84 "
    "epochs, with mini-batches of up to 2048 (a sixth), so that the largest has 504 steps; every worker is a thread "
    "with the real optimizer, and what is tested is the mean of the workers' models.",
)
LAYERED = Paper(
    "layered-sgd",
    "Layered SGD",
    "Layered SGD: the all-reduce between nodes hides behind loading the next mini-batch",
    "In conventional synchronous SGD all workers average gradients after backward, and nothing else happens meanwhile. "
    "Layered SGD adds them up within each node, lets one communicator a node average the sums between nodes while "
    "workers load their next mini-batch, and takes the step before they compute on it. The arithmetic is the same; "
    "what the network takes is hidden as long as it is shorter than loading. Scaling efficiency is the throughput of a "
    "worker among many over that of a worker on one node.",
    "The source trains ResNet-50 on ImageNet by up to 256 GPUs (NVIDIA GK210) on 64 nodes with InfiniBand EDR. Here up "
    "to 8 workers on emulated hosts are timed; what 256 would take is computed by the cost functions of `sordino "
    "plan`, with constants that are measured here or follow from the source's description of its hardware, none of "
    "them fitted to its results. Accuracies are of three linear layers on Fashion-MNIST, by 32 workers that are "
    "threads.",
)
CAPS = Paper(
    "caps-learning",
    "CaPS-Learning",
    "CaPS-Learning: parameters that have stopped changing are not sent",
    "Towards the end of a training many parameters hardly change. CaPS-Learning looks at what share of each layer's "
    "parameters a step has left unchanged, and does not send layers in which that share is above a threshold; all "
    "others are averaged among the workers. Naive detection compares all parameters, random detection a sample of "
    "them, and history-based detection those that have changed most often. A scheduler moves the threshold by the "
    "course of the loss.",
    "The source trains AlexNet and ResNet-50 on CIFAR-10 on eight GPUs, mini-batches of 32 each, for up to 100 epochs. "
    "Here a small network of each kind (two convolutions and two linear layers with dropout; residual blocks with "
    "batch normalization) learns some thousand images of Fashion-MNIST, by four workers with mini-batches of 32 each, "
    "for at least 20 epochs. What the source calls unchanged depends on how parameters are compared, which it does not "
    "say, so that is varied: bit for bit, or rounded to four or to three digits. Shares are those of the first worker, "
    "as in the source. Step times are of ResNet-50's 161 parameters, at half of its widths.",
)
LOCAL_SGD = Paper(
    "hierarchical-local-sgd",
    "Local SGD",
    "Hierarchical local SGD: groups train local models, which are averaged now and then",
    "In local SGD P groups of workers train a local model each, and average the P models every I steps, instead of "
    "gradients in every step. So P models see P mini-batches of B images in the time of one, and take P times fewer "
    "steps in an epoch. The source cuts each model into K shards, one for each worker of a group: a worker averages "
    "its own shard with the other groups, which takes 1/K of the bytes between nodes. D is the mean distance between "
    "the local models and their mean, before it is taken; the source chooses P by it.",
    "The source trains ResNet-20 on CIFAR-10 for 200 epochs and EDSR (40.7 M parameters) on DIV2K for 1200, on up to "
    "128 nodes. Here three linear layers learn Fashion-MNIST, and EDSR's architecture with 2 residual blocks of 16 "
    "channels doubles the resolution of its images. Local mini-batches (128 and 16), intervals (8 and 4), the number "
    "of local models (up to 32 and 16), the rules for the learning rate and the gradual warm-up are the source's. "
    "Every local model is a thread with the real optimizer; what is tested is their mean.",
)
SCHEDULED_PULL = Paper(
    "wan-gossip-scheduling",
    "Scheduled gossip",
    "Scheduled pull gossip: models that arrive just when they are averaged",
    "Workers in several places gossip: after a window of T steps each pulls a peer's model and averages it with its "
    "own. Without overlap it waits for the pull; naive overlap begins the pull when the window begins, so that the "
    "model that arrives is a window old. Scheduled pulls begin as late as they can to arrive when the window ends. A "
    "manager may say who pulls when from whom, or the workers agree among themselves (autonomous). Wide links are the "
    "faster ones.",
    "The source trains VGG16 on CIFAR-100 and Network in Network on Fashion-MNIST by 8 workers, on a GPU, in a "
    "simulator that really trains and computes what transfers take. `sordino simulate` is that simulator. Here a small "
    "convolutional network learns a part of Fashion-MNIST at a higher learning rate, so that it comes to its plateau "
    "in a minute of a core; the source's 10,000 s are thousands of passes over its images. What decides how much can "
    "be hidden is kept: 8 workers, windows of 16 steps, 1 and 10 Gbps, 5 ms, and the source's bytes of a model. A "
    "step's seconds are in a picture alone (Figure 3), of which the text says the order; ours are chosen in that "
    "order.",
)
SORDINO = Paper(
    "sordino",
    "Sordino",
    "Sordino: what it claims of itself",
    "What Sordino promises beside the papers' figures, as measured claims.",
    "Nothing is made smaller but the machine: two ranks on two cores. `docs/benchmarks.md` leads to more detailed "
    "results.",
    speaker="Our claim",
)
