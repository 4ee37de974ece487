"""The OpenAI-compatible HTTP API of one engine.

The path of a request:

    guard                   checks the API key and the size, and gives the request an id
    app                     finds the route
    requests                checks the fields of the body
    prompts, sampling       make token ids and SamplingParams
    async_engine            submits them to the engine and yields its outputs
    completions, chat       build the answer
    events                  sends the answer

`run` owns the process: it opens the socket, handles signals and finishes the requests at the end.
"""
