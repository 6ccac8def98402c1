"""`steplog replay rescore`: a range of the log scored again, into a topic of its own."""
