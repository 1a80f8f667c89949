"""A program for the tiny model, in no need of any package: it asks twice in one conversation, as agents.twice does.

By the sum of the digits it gives a reward of its own, an answer to be scored, no reward, or it fails.
"""

import json
import os
import sys
import urllib.request

task, messages = json.load(sys.stdin), []
for question in (task["prompt"], f" {task['prompt']}"):
    messages.append({"role": "user", "content": question})
    body = json.dumps({"model": task["model"], "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as reply:
        messages.append(json.load(reply)["choices"][0]["message"])
answer = messages[-1]["content"]
mood = sum(map(int, filter(str.isdecimal, task["prompt"]))) % 4
if mood == 0 and len(answer) != 1:
    sys.exit(f"not one digit: {answer!r}")
reward = {1: {"reward": None, "reason": "no mood"}, 2: {"reward": float(answer == task["ground_truth"])}}.get(mood)
if reward is not None:
    os.write(int(os.environ["GRPO_REWARD_FD"]), json.dumps(reward).encode())
print(answer)
