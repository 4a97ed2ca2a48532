"""The write site: padded columns to batches and messages."""
