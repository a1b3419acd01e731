"""What processes tell each other of suspensions: records, who works on a process, and whose turn a restore is."""
