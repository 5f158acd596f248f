"""From settings to a model that runs: its weights, whether it can be served, and proof that it computes the same."""
