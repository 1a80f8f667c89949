"""The evaluation head serves policies to environment servers in batches, and shows the results on a dashboard."""
