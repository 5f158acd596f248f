"""A small language model with the target's tokenizer as a drafter."""
