"""The record of a job: one schema for live and simulated runs."""
