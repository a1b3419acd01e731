"""The toy."""
