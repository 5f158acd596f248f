"""Shared by neural drafters: a paged cache, tree attention over it, and trees that grow a level at a time."""
