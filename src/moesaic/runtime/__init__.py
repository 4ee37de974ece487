"""The attention worker: carries out what its brain decides."""
