"""What the command plan.py answers, and how it prints it.

Each module may import those above it:

  search     the least or the most that fits
  commands   plans, sweeps, and searches, from the options of plan.py
  report     plans as text
"""
