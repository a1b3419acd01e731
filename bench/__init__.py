"""Figures of a release: one function a measurement, one result file a release. `python -m bench --help` says more."""
