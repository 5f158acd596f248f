"""The target service: runs the model, verifies token trees, streams accepted tokens."""
