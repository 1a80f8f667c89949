import sys

last = int(sys.argv[1])
for number in range(1, last):
    print(number * number)
