"""Packing as numbers: row lengths to layouts and micro-batches, with numpy alone."""
