"""Seeded faults in a real job of several processes. `python -m tests.faults --help`."""
