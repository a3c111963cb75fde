"""Who started this rank, how the ranks meet, and what they tell the launcher."""
