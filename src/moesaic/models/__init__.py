"""Mixture-of-experts models as plain math within one process, with one file per model_type."""
