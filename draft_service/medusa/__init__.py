"""Medusa heads (arXiv 2401.10774): one guess for each of the next tokens, all from one hidden state."""
