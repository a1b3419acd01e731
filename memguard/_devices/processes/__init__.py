"""The processes of one user on this machine: where they leave notes for each other, and which of them still live."""
