"""Data rows: readers, columns, shapes, split, order."""
