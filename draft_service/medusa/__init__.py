"""Medusa heads (arXiv 2401.10774): predictions of the next few tokens, all from one hidden state."""
