"""Layers with sliding windows: what they cost over long contexts."""
