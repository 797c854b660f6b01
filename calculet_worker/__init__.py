"""One board: its device, its scheduler and its KV manager. `engine` is the pure core, `shell/` makes it run, `device/` are the boards."""
