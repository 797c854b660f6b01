"""The whole fleet in virtual time: what it proves and what it cannot is in docs/explanation/simulation.md."""
