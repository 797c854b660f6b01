"""HTTP, worker links and the process."""
