"""Exact and approximate operations on a model's structure: `untie`, `gqa`, and the ridge regression that heals."""
