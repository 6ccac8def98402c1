"""Runs reward functions on trajectories, and turns their results into records."""
