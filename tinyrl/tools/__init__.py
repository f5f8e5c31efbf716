"""Tools for runs and models: check, report, export, chat, serve. Nothing below imports them."""
