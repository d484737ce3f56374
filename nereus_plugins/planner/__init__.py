"""The search for the best global plan that fits in memory."""

from .search import Planned, Rejection, plan

__all__ = ["Planned", "Rejection", "plan"]
