"""Gemma 4's assistant: a drafter without keys of its own, which attends to those of its target."""
