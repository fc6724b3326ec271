# SPDX-License-Identifier: BSD-3-Clause
"""Models, data, and checkpoints of the labs."""
