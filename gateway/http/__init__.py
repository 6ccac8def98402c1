"""The HTTP edge: routes, requests and responses, API keys, the OpenAPI document."""
