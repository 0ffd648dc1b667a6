"""`mpitrain import` and `mpitrain export`: Hugging Face folders to runs and checkpoints, and back."""
