"""`jax.config`."""


class _Config:
    jax_pjrt_client_create_options = None
    jax_platforms = None

    def update(self, name, value):
        if not hasattr(self, name):
            raise AttributeError(f"Unrecognized config option: {name}")
        setattr(self, name, value)


config = _Config()
