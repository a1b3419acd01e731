"""The session of a budget: lifecycle, monitor, pressure, leak detection, extensions, and retry after out-of-memory."""
