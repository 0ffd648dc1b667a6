"""The search for an order of a step under a memory limit: what is asked, one play, and its improvement."""
