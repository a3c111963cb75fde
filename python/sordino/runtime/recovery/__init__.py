"""Recovery of the remaining ranks after a loss."""
