"""Runnable examples, each on its own."""
