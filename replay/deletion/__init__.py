"""`steplog replay delete`: a copy of the log without the deleted records."""
