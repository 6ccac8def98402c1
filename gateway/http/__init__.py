"""The HTTP edge: endpoints, requests and responses, API keys, the OpenAPI document, the server."""
