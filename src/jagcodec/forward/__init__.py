"""Forward passes: layouts and micro-batches as numbers, and plans that apply them to batches."""
