"""The ledger: a table of each GPU's memory by holder, whose rows add up to the total that the driver reports."""
