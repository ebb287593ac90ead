"""Measures with intervals: what an operation did to a model, on identical tokens."""
