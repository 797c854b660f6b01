"""Ways to start and stop worker processes."""
