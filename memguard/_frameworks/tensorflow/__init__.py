"""TensorFlow: its adapter, its gates, and its use of the shared pool."""
