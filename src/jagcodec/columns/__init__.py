"""Who holds rows: columns in memory, whose type is asked for once."""
