"""The draft service: proposes token trees ahead of the target."""
