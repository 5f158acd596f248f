"""The target service: runs the model, verifies token trees, streams what was accepted."""
