"""The server that `memguard top` connects to: it runs in the watched process."""
