"""What an environment shows and stores for people: metrics, rollouts, an HTML page, progress."""
