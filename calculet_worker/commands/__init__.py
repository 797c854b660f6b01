"""What a worker's program can do besides serving: building packages, making keys."""
