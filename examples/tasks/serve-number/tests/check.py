import urllib.request

for number in (1, 41, 99):
    with urllib.request.urlopen(f"http://127.0.0.1:8765/{number}", timeout=5) as reply:
        assert reply.read().decode() == str(number + 1), number
