"""The measurements, one a module; `bench.measure.discover` imports each file of this folder."""
