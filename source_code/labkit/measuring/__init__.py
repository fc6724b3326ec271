# SPDX-License-Identifier: BSD-3-Clause
"""Measure a training step: memory by category, collectives, time, and the hardware."""
