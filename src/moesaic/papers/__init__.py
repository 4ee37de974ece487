"""Published results, computed again for `moesaic plan --paper`. Nothing else in moesaic uses this room."""
