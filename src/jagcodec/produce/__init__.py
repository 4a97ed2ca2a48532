"""The producer's side: padded columns and rows to batches and messages."""
