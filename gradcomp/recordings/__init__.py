"""Show what recorders have written, on one page."""
