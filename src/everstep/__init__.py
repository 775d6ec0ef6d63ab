"""Everstep."""
