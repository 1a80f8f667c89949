"""Stands in for SGLang in tests of what surrounds an engine. Never on the path but of those tests."""
