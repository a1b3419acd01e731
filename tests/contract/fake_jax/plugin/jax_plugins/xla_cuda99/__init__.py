"""What looks like a CUDA plugin of JAX. Looking for one must not import it."""

raise ImportError("there is no GPU behind this plugin")
