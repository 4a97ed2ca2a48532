"""Rows of a column."""
