"""What every kind of head shares: its checkpoint, the target that it was made for, and the tokens that it can say."""
