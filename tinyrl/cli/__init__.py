"""The command line: commands, checks before torch is loaded, errors as sentences and exit codes."""
