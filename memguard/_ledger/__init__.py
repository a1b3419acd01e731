"""The ledger: each GPU's memory by holder, in rows that add up to the driver's total; readings, rows and tables."""
