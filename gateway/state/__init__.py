"""What the gateway remembers of trajectories, and how the log gives it back."""
