"""What drafts are to the engine: trees by sequence, the link to a draft service, and when drafts pay."""
