"""A tenant's process: uses so much of a CPU, until it is ended. `burner.py 0.5` is half of one."""

import sys
import time

_SLICE_SECONDS = 0.02


def main() -> None:
    share = float(sys.argv[1])
    while True:
        until = time.thread_time() + _SLICE_SECONDS
        while time.thread_time() < until:
            pass
        time.sleep(_SLICE_SECONDS * (1 / share - 1))


if __name__ == "__main__":
    main()
