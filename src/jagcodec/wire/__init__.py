"""Messages: constants, header, writer and reader."""
