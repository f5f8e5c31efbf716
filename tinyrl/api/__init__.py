"""tinyrl in a script or a notebook: train, evaluate, open_run, over what the commands use. Loads no torch by itself."""
