"""State of a job: its placement on ranks, its files, and its redistribution over other ranks."""

from tfposeidon.state.placement import Placement, register

__all__ = ["Placement", "register"]
