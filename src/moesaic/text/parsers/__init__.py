"""Reads a model's answer while it is generated: reasoning, content and tool calls. Text in, events out."""
