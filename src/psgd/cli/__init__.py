"""The command line: the only package where text becomes objects."""
