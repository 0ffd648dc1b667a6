"""One file a page: measure(report) writes its program, its table and its pictures."""
