"""`steplog replay export`: trajectories of the log to files."""
