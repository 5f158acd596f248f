"""The transformers model behind our attention, and where its weights come from."""
