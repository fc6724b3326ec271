"""Measure a training step: memory by category, collectives, time, and the hardware."""
