"""Configuration: typed options, their values in conf/, and the command line."""

from toolkit.config.cli import entry_point

__all__ = ["entry_point"]
