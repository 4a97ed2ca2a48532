"""Programs that use the library, each to be run from a checkout; their first lines say how."""
