"""Tokens to text: the bytes of each, text as they come, and where a stop string ends it."""
