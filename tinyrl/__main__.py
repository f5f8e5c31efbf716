"""`python -m tinyrl` is the `tinyrl` command."""

from tinyrl.cli.commands import main

if __name__ == "__main__":
    main()
