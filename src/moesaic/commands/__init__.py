"""What the commands do. Each file is one command, imported only when it is called."""
