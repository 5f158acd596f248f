"""`outrider train-head`: trains EAGLE-3 and Medusa heads on their target's own text, without a data set."""
