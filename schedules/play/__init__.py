"""Simulate programs with times, measured or assumed, and draw their timeline."""
