"""The `tinyrl` command as `python -m tinyrl`."""

from tinyrl.cli.commands import main

if __name__ == "__main__":
    main()
