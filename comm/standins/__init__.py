"""Axes that send nothing: they record what a rank would do, or replay what came to it once."""
