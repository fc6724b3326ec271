"""Measure a training step: memory by category, collectives, time; and say on what."""
