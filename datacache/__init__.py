"""Samples decoded once, read at memory speed ever after (CommLib, section 4.1)."""

from datacache.order import Order, Position

__all__ = ["Order", "Position"]
