"""`outrider train-head`: EAGLE-3 and Medusa heads, on what their target writes. No data set, no features on disk."""
