"""Processes that a run starts beside its own, each by its module's name: writers of text, and followers of training."""
