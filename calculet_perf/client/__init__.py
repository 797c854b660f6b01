"""What a client knows of an OpenAI-compatible server's answers, without input and output; `calculet_perf.shell.http` does those."""
