"""Recurrent layers over trees."""
