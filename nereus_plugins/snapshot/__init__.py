"""Snapshots of units: taken at a boundary, written in the background, restored into any layout.

At a boundary each rank copies its part of the state to host memory; a thread does the rest. What a
snapshot holds is boxes of named tensors, so a restore is planned moves from files to shards.
"""
