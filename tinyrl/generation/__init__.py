"""Sampling engines: requests in, ragged samples out."""
