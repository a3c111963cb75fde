"""Local SGD: communication, PyTorch's own beside it, accuracy, and predictions (local_sgd.py)."""
