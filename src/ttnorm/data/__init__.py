"""Data sets in the layouts people have them in."""
