"""Prove a set of programs: no deadlock, every message met, every gradient reduced once."""
