"""The frameworks' arrays: how each is read, and how it is made of another's memory."""
