"""The input and output of `calculet-perf`."""
