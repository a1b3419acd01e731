"""What other processes see of this one, and ask of it: leases, suspension, metrics and `memguard top`."""
