"""What people do with runs and models once they are there. Reads runs; nothing below knows it."""
