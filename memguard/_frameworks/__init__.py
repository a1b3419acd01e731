"""One file per framework; the contract stands in `base.py`."""
