"""Answer what plan.py is asked, and print it.

Each module may import those above it:

  config_files   whose configuration a file is
  search         the least or the most that fits
  commands       plans, sweeps, and searches, from the options of plan.py
  report         plans as text
"""
