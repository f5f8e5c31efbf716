"""Commands fuzzed by the hundred: cases from tables and fixed seeds, each run in a fork of a process that has torch."""
