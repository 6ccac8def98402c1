"""`steplog replay diff`: two sets of rewards compared."""
