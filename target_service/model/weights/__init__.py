"""The weights of a model that is being served, exchanged for others."""
