"""What runs an environment: groups, their scheduling, the journal, sessions and evaluations."""
