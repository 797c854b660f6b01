"""What makes the pure engine run: event loop, device thread, tokenizing, telemetry."""
