"""The claims of CaPS-Learning, on skipping parameters that have stopped changing."""
