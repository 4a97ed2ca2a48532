"""Many messages as one batch: opened together, joined, and read at once."""
