"""Exact and approximate operations on a model's structure. Now: `untie`."""
