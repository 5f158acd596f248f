"""Services with a model of real text at a large shape's cost, plain and with every kind of draft."""
