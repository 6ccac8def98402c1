"""`steplog replay lineage`: the records of a trajectory, and its outcome in each run."""
