"""The gateway between agents and engines: an OpenAI endpoint that records every token, one session an episode."""
