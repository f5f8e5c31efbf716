"""The process: its signals and exceptions, the options of its command, and the launch it is part of."""
