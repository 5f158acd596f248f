"""EAGLE heads: drafters that read the target's hidden states (arXiv 2401.15077, 2406.16858, 2503.01840, 2605.09992)."""
