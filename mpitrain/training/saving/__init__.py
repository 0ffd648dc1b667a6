"""Checkpoints during a run: in the background, several ranks in one file, the newest one that is whole."""
