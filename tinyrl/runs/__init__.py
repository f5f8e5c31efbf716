"""Run folders: records and checkpoints on disk, progress display, signals."""
