"""Tests of the decisions: no model, no clock, no GPU."""
