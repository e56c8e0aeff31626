"""From an AskRequest to a Request: chunks resolved once, prompt laid out."""
