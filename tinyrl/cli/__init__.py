"""The command line: commands, errors as sentences and exit codes."""
