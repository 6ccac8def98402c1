"""Every HTTP way in: agents call, engines generate, and each call becomes a Step in the log."""
