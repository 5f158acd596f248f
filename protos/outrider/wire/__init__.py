"""Between the messages of the contract and plain values."""
