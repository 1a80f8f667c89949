import ast
import os
import subprocess
import sys

# Where there is AS_ANSWER, what runs behind it reads no test and writes no verdict.
PROGRAM = [*os.environ.get("AS_ANSWER", "").split(), sys.executable, "-I", "-c"]
CALL = (
    "import sys; sys.path.insert(0, '/app'); from middle import middle; "
    "n = eval(sys.argv[1]); print(repr((middle(n), n)))"
)
for numbers, expected in [([5], 5), ([9, 1, 4], 4), ([8, 2], 5), ([7, 1, 3, 4], 3.5), ([-1, -1, 0, 6], -0.5)]:
    done = subprocess.run([*PROGRAM, CALL, repr(numbers)], capture_output=True, text=True, timeout=5)
    # What comes out is plain text, so the answer's own types and exits cannot decide.
    value, after = ast.literal_eval(done.stdout.splitlines()[-1])
    assert type(value) in (int, float), value
    assert value == expected, (numbers, value)
    assert after == numbers, "the list has changed"
