"""The demo: one prompt with and without drafts, what it took, and the request's trace."""
