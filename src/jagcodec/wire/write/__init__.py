"""A value to frames: its items, their places, and the message."""
