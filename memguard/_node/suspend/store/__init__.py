"""Files in the user's own folder: records of suspended processes, who works on one, whose turn a restore is."""
