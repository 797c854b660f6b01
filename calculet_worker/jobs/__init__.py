"""What becomes of a submission: leases, jobs in flight, completions, recovery."""
