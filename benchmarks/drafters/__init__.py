"""Drafters: acceptance, cost, round trips."""
