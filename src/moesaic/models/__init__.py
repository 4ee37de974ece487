"""Mixture-of-experts models as plain math of one process, a file per model_type."""
