"""The version, alone in a file so that builds read it without importing the package."""

__version__ = "0.1.0.dev0"
