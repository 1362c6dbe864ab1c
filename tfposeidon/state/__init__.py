"""State of a job: what it is to other ranks, on disk, and over another number of ranks."""

from tfposeidon.state.placement import Placement, register

__all__ = ["Placement", "register"]
