"""Benchmarks of Outrider, in a folder for each part; see `README.md`."""
