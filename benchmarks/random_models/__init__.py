"""Shapes of real models, and random weights for them."""
