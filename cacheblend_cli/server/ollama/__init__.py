"""Ollama's API beside OpenAI's: the same requests and answers in another form."""
