"""Compiles and installs the real engine (llama.cpp): `python -m calculet_worker.device.build`."""
