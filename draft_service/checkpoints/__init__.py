"""Shared by heads of every kind: reading checkpoints, matching a head with its target, draft vocabularies."""
