"""`jax.errors`."""


class JaxRuntimeError(RuntimeError):
    pass
