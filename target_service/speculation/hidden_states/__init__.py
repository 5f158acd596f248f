"""The target's hidden states: encoded, kept, and sent to a drafter that reads them."""
