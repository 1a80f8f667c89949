import json
import os
import subprocess
import sys

# Where there is AS_ANSWER, what runs behind it reads no test and writes no verdict.
PROGRAM = [*os.environ.get("AS_ANSWER", "").split(), sys.executable, "-I"]
CASES = {
    "shout": ("Quiet sea", "QUIET SEA"),
    "back": ("lamp", "pmal"),
    "vowels": ("a long road", "4"),
}
CALL = (
    "import sys; sys.path.insert(0, '/app'); import text; "
    "sys.stdout.write(str(getattr(text, sys.argv[1])(sys.argv[2])))"
)
marks = {}
for name, (text, expected) in CASES.items():
    done = subprocess.run([*PROGRAM, "-c", CALL, name, text], capture_output=True, text=True, timeout=5)
    marks[name] = float(done.returncode == 0 and done.stdout == expected)
with open("/logs/verifier/reward.json", "w", encoding="utf-8") as file:
    json.dump({"reward": sum(marks.values()) / len(marks), **marks}, file)
