"""Drafters by themselves: acceptance, cost, round trips."""
