"""How a decode batch's lanes are chosen among the ready sequences; one policy a file."""
