"""The fetch site: batches to what a trainer takes, and the rows of a batch."""
