"""What every Calculet process talks about: the shared vocabulary, and nothing that does input or output outside `shell/`."""
