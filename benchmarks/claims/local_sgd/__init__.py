"""Claims of hierarchical local SGD about accuracy, distance, communication and speedup."""
