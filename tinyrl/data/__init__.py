"""Data rows: readers, columns, order."""
