"""The report on recorded runs: one HTML file that needs no network, and the same figures for other tools.

`collect` reads a timeline once and makes a `Run` of it, in memory that does not depend on its length; `page` draws one
or two runs, `texts` and `perfetto` write them for a pull request, a spreadsheet and a trace viewer. All text of a
timeline is untrusted.
"""
