"""Claims of scheduled pull gossip about accuracy, waiting and ages of models."""
