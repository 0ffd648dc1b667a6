"""Tables in files: the user's own, CSV, the field's notation, and other projects', read and written."""
