"""The HTTP API of one engine, in OpenAI's form and in Anthropic's.

The path of a request:

    guard                   checks the API key and the size, and gives the request an id
    app                     finds the route
    requests                checks the fields of the body; unknown_fields decides about the others
    prompts, sampling       make token ids and SamplingParams; structured and tools add the grammar
    async_engine            submits them to the engine and yields its outputs
    completions, chat       build the answer; answers tells reasoning and calls apart
    anthropic, openai_responses    turn their bodies into chats, and the chat's blocks into their answers
    events                  sends the answer

`run` owns the process: it opens the socket, handles signals and finishes the requests at the end.
"""
