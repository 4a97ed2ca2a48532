"""Bytes, and where they come from."""
