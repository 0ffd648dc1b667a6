"""Tables in files: the user's own, CSV, PyTorch's, and the field's notation."""
