"""What a worker does with an event: one brain a file, one vocabulary of events and actions."""
