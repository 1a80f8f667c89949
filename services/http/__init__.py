"""The HTTP layer of every service: application factory, middleware, problem documents, server, retrying client."""
