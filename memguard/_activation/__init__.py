"""What `memguard run` puts at the front of PYTHONPATH: a `sitecustomize` that activates the budget."""
