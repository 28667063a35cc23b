"""Operators by element: gates, activations, scales."""
