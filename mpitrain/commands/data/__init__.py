"""`mpitrain data`: show."""
