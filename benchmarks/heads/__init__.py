"""Benchmarks of draft heads that the target runs behind its own passes."""
