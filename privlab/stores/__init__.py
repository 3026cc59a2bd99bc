"""Run directories: records as Parquet parts, strips, and their maintenance."""
