"""PyTorch: its adapter, its settings, its allocation history."""
