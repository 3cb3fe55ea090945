"""OpenAI's HTTP API over one `AsyncEngine`. `protocol` and `answers` know no HTTP; `app` is the ASGI application."""
