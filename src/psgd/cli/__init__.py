"""The command line: the only place where text becomes objects."""
