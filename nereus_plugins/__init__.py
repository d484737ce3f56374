"""Nereus: change the parallel layout of a live RL post-training job between its iterations."""

__version__ = "0.1.0"
