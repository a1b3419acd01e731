"""Processes as Linux reports them: state, descendants, memory mappings, and the holders of a GPU's memory."""
