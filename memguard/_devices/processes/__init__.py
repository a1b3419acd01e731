"""What Linux says of processes: their state and family, what they have mapped, and who holds a GPU's memory."""
