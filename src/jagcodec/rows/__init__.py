"""Rows of cells: their splits, views of them, and copies; nothing here knows who holds them."""
