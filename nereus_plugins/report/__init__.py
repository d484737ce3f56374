"""Comparisons of policies or jobs, and pages from their records.

A comparison is measured (records of live jobs) or simulated (policies on a trace), never both.
"""
