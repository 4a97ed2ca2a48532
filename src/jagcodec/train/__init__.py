"""The trainer's side: batches to rectangles, and the rows of a batch."""
