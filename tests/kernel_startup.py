# SPDX-License-Identifier: BSD-3-Clause
"""The kernels of the tests begin with this: they doubt every verdict, and keep no other name of it."""

import doubts

doubts.install()
del doubts
