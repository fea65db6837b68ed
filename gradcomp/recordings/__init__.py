"""Show recorders' files as one HTML page."""
