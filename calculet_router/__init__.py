"""The front door: OpenAI-compatible HTTP in, one worker per request out, no waiting queue of its own."""
