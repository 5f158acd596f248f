"""The layers of a decoder in their plain form, over R rows of any sequences and a paged cache."""
