"""The input and output that more than one process needs, each thing once."""
