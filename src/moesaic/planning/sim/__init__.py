"""A cluster in virtual time: the policies that the engine runs, with modelled devices, links and requests."""
