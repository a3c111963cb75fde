"""Claims of Layered SGD about communication, scaling and accuracy."""
