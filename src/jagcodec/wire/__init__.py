"""The message: `spec` (constants), `records` and `header` (no torch), `encoder`, `decoder`."""
