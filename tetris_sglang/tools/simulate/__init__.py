"""Serving simulated step by step: recorded drafts, timed passes, invented load (docs/simulate.md)."""
