"""What captured steps run."""
