"""Keeping boards alive: desired state against observed state, and the operators' commands."""
