import os
import subprocess
import sys

# Where there is AS_ANSWER, what runs behind it reads no test and writes no verdict.
PROGRAM = [*os.environ.get("AS_ANSWER", "").split(), sys.executable, "-I"]
for last in (1, 4, 9):
    done = subprocess.run([*PROGRAM, "/app/squares.py", str(last)], capture_output=True, text=True, timeout=5)
    assert done.stdout.split() == [str(number * number) for number in range(1, last + 1)], last
