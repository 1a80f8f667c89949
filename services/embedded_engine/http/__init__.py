"""The routes of the embedded engine: SGLang's, and OpenAI's chat and text completions."""
