"""Trains EAGLE-3 heads on what their target writes: `outrider train-head`. No data set, no features on disk."""
