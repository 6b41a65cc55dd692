"""How a step is fast: blocks of one shape together, all blocks of a device at once, and recorded steps."""
