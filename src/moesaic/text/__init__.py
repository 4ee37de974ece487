"""Text into tokens and back: tokenizers, templates, parsers, structured output and where an answer stops."""
