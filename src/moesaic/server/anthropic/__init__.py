"""Anthropic's API over a chat: /v1/messages and /v1/messages/count_tokens.

`body` has the fields of a request, `conversation` makes a chat of them, `answer` writes the answer,
`errors` the errors, and `routes` has the endpoints.
"""
