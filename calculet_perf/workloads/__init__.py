"""What is sent: the matrix as data, its cells, their arrivals and their prompts (acceptance §6, §7). All of it follows from the
matrix and one seed, so that two runs of the same manifest send the same."""
