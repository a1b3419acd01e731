"""The frameworks' calls while the process is off its GPUs: made to wait, answered, or kept from happening."""
