"""Entry points of the processes that a run starts: writers of text, and followers of training."""
