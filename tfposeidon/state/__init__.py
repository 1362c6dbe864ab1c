"""Places a job's state on ranks, saves it in files, and redistributes it over other ranks."""

from tfposeidon.state.placement import Placement, register

__all__ = ["Placement", "register"]
