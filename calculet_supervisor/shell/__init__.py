"""Processes, sockets and the store."""
