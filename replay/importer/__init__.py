"""`steplog replay import`: exported files and white-box dumps to the log."""
