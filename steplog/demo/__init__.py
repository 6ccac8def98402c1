"""`steplog demo`: the whole loop on one machine, with a model that is made on the spot."""
