"""Measurements of Outrider, by what is measured. `README.md` says how each is run."""
