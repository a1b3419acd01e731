"""cuda-python: memguard does not cap it, but gates its calls while the process is suspended."""
