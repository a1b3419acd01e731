"""TensorFlow: the adapter, the gates, and the shared pool's adapter."""
