"""The command line: commands, what is checked before torch is loaded, errors as sentences and exit codes."""
