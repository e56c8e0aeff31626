"""From an AskRequest to a Request, resolved once, and from what was computed to an Answer."""
