"""`sordino run`: it starts the ranks of a job, supervises them, and restarts them."""
