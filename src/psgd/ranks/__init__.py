"""Ranks that share the work of a step."""
