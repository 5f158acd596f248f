"""Grammars that outputs are kept to: compiled from their forms, and followed along the rows of trees."""
