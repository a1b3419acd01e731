"""The frameworks' arrays: how each is read, and how one is made of another framework's memory."""
