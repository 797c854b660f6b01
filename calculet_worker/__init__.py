"""One board: its device, its scheduler, its KV manager. `engine` is the pure core, `shell/` makes it run, `device/` are boards."""
