"""Whether a process can be suspended: facts about it, and the reasons against a suspension."""
