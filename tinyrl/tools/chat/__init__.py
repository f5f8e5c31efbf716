"""A conversation with a policy: its answers as they are written, what tools say, the start beside it, its reward."""
