"""Serving a model over HTTP, by OpenAI's interface. Needs the extra ``serve``."""
