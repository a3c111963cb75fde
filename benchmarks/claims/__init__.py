"""Claims of the papers, and how each is tested here: a folder of modules for each paper."""
