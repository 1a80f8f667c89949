"""The agent of `make demo-harbor`: the model's answer to a task is a line of shell, which runs in the task's box."""

import json
import os
import subprocess
import sys
import urllib.request

task = json.load(sys.stdin)
# The model has never seen such a task. One answer, to a question that is put in another way, makes it try.
messages = [
    {"role": "user", "content": "The sum of 31 and 12, in k.txt, please."},
    {"role": "assistant", "content": "echo $((31 + 12)) > k.txt"},
    {"role": "user", "content": task["prompt"]},
]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": task["model"], "messages": messages}).encode(),
    {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as reply:
    said = json.load(reply)["choices"][0]["message"]["content"]
subprocess.run(["sh", "-c", said.strip().partition("\n")[0]], timeout=10, check=False)
