"""Ways to store cells: narrow, and elided."""
