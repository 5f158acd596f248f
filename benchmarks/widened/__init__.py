"""Services with a model of real text at the cost of a large shape, plain and with every kind of draft."""
