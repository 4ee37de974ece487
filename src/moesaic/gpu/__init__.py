"""Everything that only a GPU runs. A process imports it when its configuration names something of it."""
