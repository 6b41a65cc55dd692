"""Primitives: a torch reference of each and, where it pays, a Triton twin."""
