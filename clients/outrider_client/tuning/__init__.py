"""Finds settings of drafts that a model, a drafter and a machine gain by, within a given time."""
