"""Tools for people: doctor, suggestions, simulation, reports, `memguard top`, testing; activation at Python's start."""
