"""What the optimizer keeps, checks, saves and loads."""
