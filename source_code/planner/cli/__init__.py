# SPDX-License-Identifier: BSD-3-Clause
"""Answer what plan.py is asked, and print it.

Each module may import those above it:

  config_files   whose configuration a file is
  coverage       why a model must be simulated
  search         the least or the most that fits
  commands       plans, sweeps, and searches, from the options of plan.py
  report         plans as text
"""
