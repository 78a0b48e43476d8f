"""`recnet tables`."""

from recnets.experiments.make_tables import Tables as command

__all__ = ["command"]
