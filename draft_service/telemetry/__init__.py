"""The draft service's metrics and traces."""
