"""A program that works in the box of a task: it writes the tiny model's answer to a sum into a file."""

from __future__ import annotations

import json
import os
import sys
import urllib.request

if __name__ == "__main__":
    task = json.load(sys.stdin)
    body = {"model": task["model"], "messages": [{"role": "user", "content": task["prompt"]}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as reply:
        said = json.load(reply)["choices"][0]["message"]["content"] or ""
    with open("said.txt", "w", encoding="utf-8") as file:
        file.write(said)
