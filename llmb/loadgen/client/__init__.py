"""Client of the OpenAI API: HTTP/1.1, server-sent events, responses, requests."""
