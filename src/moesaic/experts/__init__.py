"""The routed experts behind one interface, whether they run in this process or on expert servers."""
