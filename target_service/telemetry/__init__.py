"""The target's metrics and traces."""
