"""Finds settings of drafts that are fastest for a model, a drafter and a machine, within a given time."""
