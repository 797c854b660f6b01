"""Boards. Each backend is one file and one line in `BACKENDS`; the contract suite runs over all of them."""
