"""Rollouts and the groups they form."""
