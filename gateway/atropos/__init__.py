"""The Atropos rollout API on the log: environments post scored groups, a trainer pulls batches."""
