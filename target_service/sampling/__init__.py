"""From logits to tokens: the distribution that a token is drawn from, and which drafted rows agree with it."""
