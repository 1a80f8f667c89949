"""The groups of a step: fetched, generated, scored, stored, sampled again; evaluation on held-out prompts."""
