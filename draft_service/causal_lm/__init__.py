"""A small language model of the target's tokenizer as drafter."""
