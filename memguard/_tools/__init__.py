"""Tools for people: the doctor, suggestions, simulation, reports, `memguard top` and testing."""
