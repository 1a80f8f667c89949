"""The clients that trainer, collectors and evaluation call the services with.

Each is an async context manager over one HttpClient and raises its errors: RequestRefusedError for a request that the
service refuses, DependencyLostError for a service that does not answer in time.
"""
