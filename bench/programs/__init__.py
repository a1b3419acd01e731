"""Programs that measurements run as a user would: under `memguard run`, or under a budget of their own."""
