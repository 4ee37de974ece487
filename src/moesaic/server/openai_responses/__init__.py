"""OpenAI's /v1/responses over a chat. The server keeps no state: each request has the whole conversation.

`body` has the fields of a request, `conversation` makes a chat of them, `answer` writes the answer from the
objects of `objects`, and `routes` has the endpoint.
"""
