"""Several processes on one machine, connected by gloo."""
