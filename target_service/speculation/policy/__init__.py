"""When drafts are used and how many of their rows are verified: by what steps cost and what drafts make."""
