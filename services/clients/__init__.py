"""The clients by which trainer, collectors and evaluation call the services.

Each is an HttpClient and raises its errors: RequestRefusedError for a request that the service refuses,
DependencyLostError for a service that does not answer in time.
"""
