"""Trajectories in memory: opening, closing, admission, and how they are read back from the log."""
