"""Proving it: a black-box client of any OpenAI-compatible server."""
