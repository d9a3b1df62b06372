"""The library's version, which every file it writes carries."""

__version__ = "0.1.0"
