"""Moving messages between processes. A transport never learns what a message means."""
