"""Claims of CaPS-Learning about skipping parameters that have stopped changing."""
