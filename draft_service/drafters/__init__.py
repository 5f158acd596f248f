"""The protocol that every drafter implements, drafters of a single file, and trees as arrays."""
