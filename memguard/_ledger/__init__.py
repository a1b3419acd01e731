"""Who holds what on each GPU, in rows that add up to what the driver reports: the readings, the rows, the tables."""
