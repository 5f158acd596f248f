"""The target's hidden states on their way to a drafter that asked for them."""
