"""The demo: one prompt with and without drafts, their figures, and the request's trace."""
