"""Who starts a suspension or its end besides the program: idleness, notebooks, leases, other processes, exit."""
