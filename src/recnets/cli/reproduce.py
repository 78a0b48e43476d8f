"""`recnet reproduce`."""

from recnets.experiments.reproduce import Reproduce as command

__all__ = ["command"]
