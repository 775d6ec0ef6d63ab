"""Benchmarks: what saving every step costs, and how fast a step comes back. The command line runs them."""
