"""TensorFlow: its adapter, its gates, and its part in the shared pool."""
