"""The folder that `memguard run --record` puts on the path of a program."""
