"""One administrative verb per file."""
