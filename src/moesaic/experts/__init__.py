"""The routed experts, behind one interface wherever they run."""
