"""Claims of Crossover-SGD about gossip: accuracies, and training over slow links."""
