"""Frames to an open message, its values and its columns."""
